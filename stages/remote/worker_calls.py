"""What a link may ask the stage of its worker, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine import SamplingParams
from engine.interface.placed_error import PlacedError
from stages.remote.control import Call, Returned, StageFacts
from stages.stage import Stage, StageStats

__all__ = ["WorkerCalls", "facts_of"]


class WorkerCalls:
    """The methods of a stage that are called between its steps, and those that only look.

    Args:
        stage: to ask.

    Attributes:
        at_once: what may be asked beside a step.
        in_turn: what changes the stage, and waits for its step.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.at_once: Mapping[str, Callable[..., Any]] = {
            "stats": self._stats,
            "describe": lambda: dict(stage.describe()),
            "check_sampling": self._check_sampling,
        }
        self.in_turn: Mapping[str, Callable[..., Any]] = {
            "reset_prefix_cache": stage.reset_prefix_cache,
            "check_integrity": stage.check_integrity,
            "set_enable_prefix_caching": self._set_enable_prefix_caching,
        }

    def answer(self, call: Call) -> Returned:
        """Do what is asked; whatever it raises is the answer."""
        method = self.at_once.get(call.method) or self.in_turn[call.method]
        try:
            return Returned(call.number, method(*call.arguments))
        except PlacedError as error:
            return Returned(call.number, None, str(error), ValueError.__name__, error.place)
        except Exception as error:  # it is raised again at the other end
            return Returned(call.number, None, str(error), type(error).__name__)

    def _stats(self) -> Mapping[str, StageStats]:
        return {self._stage.name: self._stage.stats()}

    def _check_sampling(self, params: SamplingParams) -> None:
        self._stage.check_sampling(params)

    def _set_enable_prefix_caching(self, value: bool) -> None:
        self._stage.enable_prefix_caching = value


def facts_of(stage: Stage) -> StageFacts:
    """What a stage says of itself."""
    return StageFacts(
        hidden_size=stage.hidden_size,
        dtype=None if stage.dtype is None else str(stage.dtype).removeprefix("torch."),
        sampling=stage.sampling,
        seed=stage.seed,
        takes_chunks=stage.takes_chunks,
        gives_chunks=stage.gives_chunks,
        speakers=stage.speakers,
        has_cache=stage.has_cache,
        enable_prefix_caching=stage.enable_prefix_caching,
        final_output_kinds=stage.final_output_kinds,
        description=dict(stage.describe()),
    )
