"""A stage that runs in another process, as its worker told of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from engine import SamplingParams
from stages.remote.control import StageFacts
from stages.stage import StageInputs, StageOutput, StageRequest
from stages.worker.distant_stage import DistantStage

if TYPE_CHECKING:
    import torch

__all__ = ["StageShape", "ToldStage"]


class StageShape(Protocol):
    """What of a stage's configuration its pipeline has to know."""

    @property
    def inputs(self) -> StageInputs | None:
        """The stages that feed it."""
        ...

    @property
    def final_output(self) -> tuple[str, ...]:
        """What the user gets of it."""
        ...


class ToldStage(DistantStage):
    """Answers for a stage by what its worker told of it, and takes nothing itself.

    Args:
        name: of the stage.
        config: of the stage.
        facts: what its worker told.
    """

    def __init__(self, name: str, config: StageShape, facts: StageFacts) -> None:
        super().__init__(
            name,
            inputs=config.inputs,
            outputs=getattr(config, "outputs", None),
            final_output=config.final_output,
        )
        self._facts = facts
        self.has_cache = facts.has_cache
        self._checked: set[str] = set()

    @property
    def hidden_size(self) -> int | None:
        """See :class:`~stages.stage.Stage`."""
        return self._facts.hidden_size

    @property
    def dtype(self) -> torch.dtype | None:
        """See :class:`~stages.stage.Stage`."""
        import torch  # only here: a link needs none of it

        return None if self._facts.dtype is None else getattr(torch, self._facts.dtype)

    @property
    def sampling(self) -> SamplingParams | None:
        """See :class:`~stages.stage.Stage`."""
        return self._facts.sampling

    @property
    def seed(self) -> int | None:
        """See :class:`~stages.stage.Stage`."""
        return self._facts.seed

    @property
    def speakers(self) -> tuple[str, ...] | None:
        """See :class:`~stages.stage.Stage`."""
        return self._facts.speakers

    @property
    def takes_chunks(self) -> bool:
        """See :class:`~stages.stage.Stage`."""
        return self._facts.takes_chunks

    @property
    def gives_chunks(self) -> bool:
        """See :class:`~stages.stage.Stage`."""
        return self._facts.gives_chunks

    def describe(self) -> Mapping[str, Any]:
        """What a worker resolved and reserved."""
        return dict(self._facts.description)

    def check_sampling(self, params: SamplingParams) -> None:
        """See :class:`~stages.stage.Stage`; what was asked before is not asked again.

        A worker that does not answer at once is not waited for: it refuses the request itself.
        """
        key = params.model_dump_json(exclude={"seed"})
        if key in self._checked:
            return
        try:
            self._ask_sampling(params)
        except (RuntimeError, TimeoutError):
            return
        if len(self._checked) < 1000:
            self._checked.add(key)

    @abstractmethod
    def _ask_sampling(self, params: SamplingParams) -> None:
        """Ask a worker, for a moment.

        Raises:
            RuntimeError: there is none.
            TimeoutError: it does not answer.
            ValueError: it refuses them.
        """

    def add_request(self, request: StageRequest) -> None:
        """Its worker takes requests, from whatever drives it alone."""
        raise RuntimeError(f"stage {self.name!r} runs elsewhere; ask its pipeline")

    def step(self) -> list[StageOutput]:
        """Its worker steps by itself."""
        raise RuntimeError(f"stage {self.name!r} runs elsewhere, where it is stepped")

    def abort(self, request_id: str) -> None:
        """Its worker drops requests, told by whatever drives it alone."""
        raise RuntimeError(f"stage {self.name!r} runs elsewhere; ask its pipeline")
