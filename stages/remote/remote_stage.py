"""A stage whose workers run elsewhere, as its pipeline sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

from engine import SamplingParams
from stages.remote.link import RemoteLink
from stages.remote.supervisor import WorkerSupervisor
from stages.stage import Stage, StageRequest, StageStats
from stages.stage_config import StageConfig
from stages.stage_output import StageOutput
from stages.worker.stage_link import WorkerState

if TYPE_CHECKING:
    import torch

_ANSWER_S = 0.2


def _fact(name: str) -> Any:
    """A property of a stage, as its workers have described it."""
    return property(lambda stage: getattr(stage._facts, name))


class RemoteStage(Stage):
    """Answers for a stage what is asked between requests; its workers do the rest.

    Args:
        workers: one for each replica; they are up.
        max_retries: how often a request is run again that was in a worker when this died.
    """

    def __init__(
        self,
        name: str,
        config: Stage | StageConfig,
        workers: Sequence[WorkerSupervisor],
        max_retries: int,
    ) -> None:
        super().__init__(
            name,
            inputs=config.inputs,
            outputs=getattr(config, "outputs", None),
            final_output=config.final_output,
        )
        first = workers[0]
        assert first.facts is not None, "its workers have built it"
        self._facts = first.facts[name]
        self.has_cache = self._facts.has_cache
        self._enable_prefix_caching = self._facts.enable_prefix_caching
        self.workers = tuple(workers)
        (edges,) = (stage.edges for stage in first.spec.stages if stage.name == name)
        self.link = RemoteLink(name, workers, edges, max_retries)
        self._checked: set[str] = set()

    def worker_states(self) -> tuple[WorkerState, ...]:
        """How its workers are doing, by replica; waits for none of them."""
        return tuple(worker.state for worker in self.workers)

    @property
    def dtype(self) -> torch.dtype | None:
        """See :class:`~stages.stage.Stage`."""
        import torch  # only here: a link needs none of it

        return None if self._facts.dtype is None else getattr(torch, self._facts.dtype)

    hidden_size = _fact("hidden_size")
    sampling = _fact("sampling")
    seed = _fact("seed")
    speakers = _fact("speakers")
    takes_chunks = _fact("takes_chunks")
    gives_chunks = _fact("gives_chunks")

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
        up = next((worker for worker in self.workers if worker.is_up), self.workers[0])
        try:
            up.call(self.name, "check_sampling", params, timeout_s=_ANSWER_S)
        except (RuntimeError, TimeoutError):
            return
        if len(self._checked) < 1000:
            self._checked.add(key)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether its workers have requests."""
        return self.link.has_requests

    @property
    def enable_prefix_caching(self) -> bool:
        """See :class:`~stages.stage.Stage`."""
        return self._enable_prefix_caching

    @enable_prefix_caching.setter
    def enable_prefix_caching(self, value: bool) -> None:
        self._call_all("set_enable_prefix_caching", value, is_setting=True)
        self._enable_prefix_caching = value

    def reset_prefix_cache(self) -> None:
        """See :class:`~stages.stage.Stage`."""
        self._call_all("reset_prefix_cache")

    def check_integrity(self) -> None:
        """See :class:`~stages.stage.Stage`."""
        self._call_all("check_integrity")

    def _call_all(self, method: str, *arguments: Any, is_setting: bool = False) -> None:
        for worker in self.workers:
            worker.call_when_up(self.name, method, *arguments, is_setting=is_setting)

    def stats(self) -> StageStats:
        """What its workers have counted, those that died as well, as far as they reported it."""
        return reduce(StageStats.beside, self.replica_stats())

    def replica_stats(self) -> tuple[StageStats, ...]:
        """The same, worker by worker."""
        return tuple(worker.stats()[self.name] for worker in self.workers)

    def close(self) -> None:
        """End its workers, with all stages that share them."""
        self.ownership.close()
        for worker in self.workers:
            worker.close()

    def add_request(self, request: StageRequest) -> None:
        """Its worker takes requests, over the link alone."""
        raise RuntimeError(f"stage {self.name!r} runs elsewhere; ask its pipeline")

    def step(self) -> list[StageOutput]:
        """Its worker steps by itself."""
        raise RuntimeError(f"stage {self.name!r} runs elsewhere, where it is stepped")

    def abort(self, request_id: str) -> None:
        """Its worker drops requests, over the link alone."""
        raise RuntimeError(f"stage {self.name!r} runs elsewhere; ask its pipeline")
