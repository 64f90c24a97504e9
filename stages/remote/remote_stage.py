"""A stage whose workers run elsewhere, as its pipeline sees it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from typing import Any

from engine import SamplingParams
from stages.remote.connection import Connect
from stages.remote.control import StageFacts, WorkerSpec
from stages.remote.remote_link import RemoteLink
from stages.remote.worker_life import WorkerLife, wait_until_built
from stages.remote.worker_main import StageShape, ToldStage
from stages.stage import StageStats
from stages.worker.stage_link import LinkedStage, StageLink, WorkerState

__all__ = ["RemoteStage", "StartingStage", "WorkerPolicy"]

_ANSWER_S = 0.2


@dataclass(frozen=True, slots=True)
class WorkerPolicy:
    """How much patience there is with workers.

    Attributes:
        max_retries: how often a request is run again that was in a worker when this died.
        stall_timeout_s: seconds without a sign of life after which a worker counts as dead.
    """

    max_retries: int = 1
    stall_timeout_s: float = 120.0


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
        config: StageShape,
        specs: Sequence[WorkerSpec],
        connect: Connect[WorkerSpec],
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
                wait_until_built(life, self._has_news)
            stage = RemoteStage(self._config, self._lives, self._specs[0].edges, self._policy)
            ended.pop_all()
        return stage

    def close(self) -> None:
        """End the workers."""
        for life in self._lives:
            life.close()


class RemoteStage(ToldStage, LinkedStage):
    """Answers for a stage what is asked between requests; its workers do the rest.

    Args:
        config: of the stage.
        lives: its workers, which are up.
        edges: the streamed edges that leave it.
        policy: see there.
    """

    def __init__(
        self,
        config: StageShape,
        lives: Sequence[WorkerLife],
        edges: tuple[Any, ...],
        policy: WorkerPolicy,
    ) -> None:
        name, facts = _only_facts(lives[0])
        super().__init__(name, config, facts)
        self._lives = tuple(lives)
        self._link = RemoteLink(name, lives, edges, policy.max_retries)
        self._enable_prefix_caching = facts.enable_prefix_caching

    @property
    def link(self) -> StageLink:
        """The way to its workers."""
        return self._link

    def worker_states(self) -> tuple[WorkerState, ...]:
        """See :class:`~stages.worker.stage_link.DistantStage`."""
        return tuple(life.state for life in self._lives)

    @property
    def workers(self) -> tuple[WorkerLife, ...]:
        """Its workers, one for each replica."""
        return self._lives

    def _ask_sampling(self, params: SamplingParams) -> None:
        self._first_up().call("check_sampling", params, timeout_s=_ANSWER_S)

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
        return tuple(life.stats()[self.name] for life in self._lives)

    def close(self) -> None:
        """End its workers."""
        self.ownership.close()
        for life in self._lives:
            life.close()

    def _first_up(self) -> WorkerLife:
        return next((life for life in self._lives if life.is_up), self._lives[0])


def _only_facts(life: WorkerLife) -> tuple[str, StageFacts]:
    """What the worker of one stage told of it, with its name."""
    assert life.facts is not None, "its workers have built it"
    ((name, facts),) = life.facts.items()
    return name, facts
