"""A stage of a pipeline in a process of its own, as its user sees it."""

from __future__ import annotations

from typing import Any

from engine import SamplingParams
from stages.remote.control import StageFacts
from stages.remote.worker_life import WorkerLife
from stages.remote.worker_main import StageShape, ToldStage
from stages.stage import StageStats
from stages.worker.stage_link import WorkerState

__all__ = ["ApartStage"]

_ANSWER_S = 0.2


class ApartStage(ToldStage):
    """Answers for a stage what is asked between requests.

    Args:
        name: of the stage.
        config: of the stage.
        facts: what its process told.
        life: of the process, which all of the pipeline's stages share.
    """

    def __init__(self, name: str, config: StageShape, facts: StageFacts, life: WorkerLife) -> None:
        super().__init__(name, config, facts)
        self._life = life
        self._enable_prefix_caching = facts.enable_prefix_caching

    def worker_states(self) -> tuple[WorkerState, ...]:
        """See :class:`~stages.worker.stage_link.DistantStage`."""
        return (self._life.state,)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether a request is in its steps, as far as is known."""
        return bool(self.stats().num_running)

    @property
    def enable_prefix_caching(self) -> bool:
        """See :class:`~stages.stage.Stage`."""
        return self._enable_prefix_caching

    @enable_prefix_caching.setter
    def enable_prefix_caching(self, value: bool) -> None:
        self._call("set_enable_prefix_caching", value, is_setting=True)
        self._enable_prefix_caching = value

    def reset_prefix_cache(self) -> None:
        """See :class:`~stages.stage.Stage`."""
        self._call("reset_prefix_cache")

    def check_integrity(self) -> None:
        """See :class:`~stages.stage.Stage`."""
        self._call("check_integrity")

    def stats(self) -> StageStats:
        """What its processes have counted, those that died as well, as far as they told it."""
        return self._life.stats()[self.name]

    def close(self) -> None:
        """The process ends with the pipeline, not with one of its stages."""
        self.ownership.close()

    def _ask_sampling(self, params: SamplingParams) -> None:
        self._life.call(f"{self.name}.check_sampling", params, timeout_s=_ANSWER_S)

    def _call(self, method: str, *arguments: Any, is_setting: bool = False) -> None:
        self._life.call_when_up(f"{self.name}.{method}", *arguments, is_setting=is_setting)
