"""A stage whose workers run elsewhere, as its pipeline sees it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, Protocol

from engine import SamplingParams
from stages.remote.connection import Connect
from stages.remote.control import Built, NotBuilt, StageFacts, WorkerSpec
from stages.remote.remote_link import RemoteLink
from stages.remote.worker_life import Ended, WorkerLife
from stages.stage import StageInputs, StageOutput, StageRequest, StageStats
from stages.worker.stage_link import LinkedStage, StageLink
from stages.worker.worker_state import WorkerState

if TYPE_CHECKING:
    import torch

__all__ = ["RemoteStage", "StartingStage", "WorkerPolicy"]

_ANSWER_S = 0.2
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class WorkerPolicy:
    """How much patience there is with workers.

    Attributes:
        max_retries: how often a request is run again that was in a worker when this died.
        stall_timeout_s: seconds without a sign of life after which a worker counts as dead.
    """

    max_retries: int = 1
    stall_timeout_s: float = 120.0


class _Shape(Protocol):
    """What of a stage's configuration its pipeline has to know."""

    @property
    def inputs(self) -> StageInputs | None: ...

    @property
    def final_output(self) -> tuple[str, ...]: ...


class StartingStage:
    """Workers that were told to build a stage; several stages are built side by side.

    Args:
        config: of the stage.
        specs: one for each replica.
        connect: starts a worker.
        policy: see there.
    """

    def __init__(
        self,
        config: _Shape,
        specs: Sequence[WorkerSpec],
        connect: Connect,
        policy: WorkerPolicy,
    ) -> None:
        self._config, self._specs, self._policy = config, tuple(specs), policy
        self._lives = [WorkerLife(spec, connect, policy.stall_timeout_s) for spec in specs]
        self._has_news = threading.Event()
        for life in self._lives:
            life.tell_news(self._has_news.set)
            life.start()

    def wait(self) -> RemoteStage:
        """Wait until it is built.

        Raises:
            ValueError: it cannot be built; its workers are ended.
        """
        with ExitStack() as ended:
            ended.callback(self.close)
            for life in self._lives:
                self._wait_for(life)
            stage = RemoteStage(self._config, self._lives, self._specs[0].edges, self._policy)
            ended.pop_all()
        return stage

    def close(self) -> None:
        """End the workers."""
        for life in self._lives:
            life.close()

    def _wait_for(self, life: WorkerLife) -> None:
        while True:
            self._has_news.clear()
            for message in life.news():
                match message:
                    case Built():
                        return
                    case NotBuilt():
                        raise ValueError(message.error)
                    case Ended():
                        raise ValueError(f"its worker {message.reason}, before it was built")
            while not self._has_news.wait(_LOOK_S):  # one that hangs says nothing for ever
                life.check_alive()


class RemoteStage(LinkedStage):
    """Answers for a stage what is asked between requests; its workers do the rest.

    Args:
        config: of the stage.
        lives: its workers, which are up.
        edges: the streamed edges that leave it.
        policy: see there.
    """

    def __init__(
        self,
        config: _Shape,
        lives: Sequence[WorkerLife],
        edges: tuple[Any, ...],
        policy: WorkerPolicy,
    ) -> None:
        super().__init__(
            lives[0].spec.name,
            inputs=config.inputs,
            outputs=getattr(config, "outputs", None),
            final_output=config.final_output,
        )
        self._lives = tuple(lives)
        self._link = RemoteLink(self.name, lives, edges, policy.max_retries)
        facts = lives[0].facts
        assert facts is not None, "its workers have built it"
        self._facts: StageFacts = facts
        self.has_cache = facts.has_cache
        self._enable_prefix_caching = facts.enable_prefix_caching
        self._checked: set[str] = set()

    @property
    def link(self) -> StageLink:
        """The way to its workers."""
        return self._link

    def worker_states(self) -> tuple[WorkerState, ...]:
        """See :class:`~stages.worker.stage_link.LinkedStage`."""
        return tuple(life.state for life in self._lives)

    @property
    def workers(self) -> tuple[WorkerLife, ...]:
        """Its workers, one for each replica."""
        return self._lives

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

    def check_sampling(self, params: SamplingParams) -> None:
        """See :class:`~stages.stage.Stage`; what was asked before is not asked again.

        A worker that does not answer at once is not waited for: it refuses the request itself.
        """
        key = params.model_dump_json(exclude={"seed"})
        if key in self._checked:
            return
        try:
            self._first_up().call("check_sampling", params, timeout_s=_ANSWER_S)
        except (RuntimeError, TimeoutError):
            return
        if len(self._checked) < 1000:
            self._checked.add(key)

    def add_request(self, request: StageRequest) -> None:
        """Its workers take requests, from its link alone."""
        raise RuntimeError(f"stage {self.name!r} runs in workers of its own; use its link")

    def step(self) -> list[StageOutput]:
        """Its workers step by themselves."""
        raise RuntimeError(f"stage {self.name!r} runs in workers of its own, which step it")

    def abort(self, request_id: str) -> None:
        """Its workers drop requests, told by its link alone."""
        raise RuntimeError(f"stage {self.name!r} runs in workers of its own; use its link")

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether its workers have requests."""
        return self._link.has_requests

    @property
    def enable_prefix_caching(self) -> bool:
        """See :class:`~stages.stage.Stage`."""
        return self._enable_prefix_caching

    @enable_prefix_caching.setter
    def enable_prefix_caching(self, value: bool) -> None:
        for life in self._lives:
            life.call_when_up("set_enable_prefix_caching", value, is_setting=True)
        self._enable_prefix_caching = value

    def reset_prefix_cache(self) -> None:
        """See :class:`~stages.stage.Stage`."""
        for life in self._lives:
            life.call_when_up("reset_prefix_cache")

    def check_integrity(self) -> None:
        """See :class:`~stages.stage.Stage`."""
        for life in self._lives:
            life.call_when_up("check_integrity")

    def stats(self) -> StageStats:
        """What its workers have counted, those that died as well, as far as they told it."""
        return reduce(StageStats.beside, self.replica_stats())

    def replica_stats(self) -> tuple[StageStats, ...]:
        """The same, worker by worker."""
        return tuple(life.stats() for life in self._lives)

    def describe(self) -> Mapping[str, Any]:
        """What a worker resolved and reserved."""
        return dict(self._facts.description)

    def close(self) -> None:
        """End its workers."""
        self.ownership.close()
        for life in self._lives:
            life.close()

    def _first_up(self) -> WorkerLife:
        return next((life for life in self._lives if life.is_up), self._lives[0])
