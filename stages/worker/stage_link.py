"""A link, by which an orchestrator reaches a stage wherever it runs, and the state of workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from stages.trace_events import Traced
from stages.worker.messages import Command, Event


@dataclass(frozen=True, slots=True)
class WorkerState:
    """How one replica of a stage is doing, and what became of the workers that it had before.

    Attributes:
        state: ``up`` takes requests; ``starting`` will; ``waiting`` will when the cluster has a
            place for it again; ``down`` never will again.
        num_restarts: workers that were started in the place of one that had ended.
        last_end: what the last one of those died of, such as ``"was killed by SIGKILL"``.
        ended_at: when, in seconds since 1970.
    """

    state: Literal["up", "starting", "waiting", "down"]
    num_restarts: int = 0
    last_end: str | None = None
    ended_at: float | None = None


def why_lost(workers: Sequence[WorkerState]) -> str | None:
    """Why a stage with such workers takes no requests, to follow its name; None if it does."""
    if any(worker.state in ("up", "starting") for worker in workers):
        return None
    waits = "it takes no requests until there is a place for it"
    for worker in workers:
        if worker.state == "waiting":
            return f"{waits}: its worker {worker.last_end}"
    return f"it cannot be used any more: its worker {workers[0].last_end}"


class StageLink(ABC):
    """One stage's worker, or the way to it.

    ``send`` and ``events`` never wait and never raise: what goes wrong with a request becomes an
    event about it. All methods are for one thread.

    ::

        send(command) ──► ...  the worker, in this thread or elsewhere  ... ──► events()
    """

    @abstractmethod
    def send(self, command: Command) -> None:
        """Hand a command in; they take effect in this order."""

    def flush(self) -> None:  # noqa: B027 - what takes commands at once has nothing to flush
        """Let the worker have what was sent; what is sent together arrives together."""

    def work(self) -> None:  # noqa: B027 - workers elsewhere work by themselves
        """Do one unit of work, where the stage is driven by the caller."""

    @abstractmethod
    def events(self) -> list[Event]:
        """What happened since this was last called."""

    def traces(self) -> list[Traced]:
        """What the worker did when, before the events that come next; nothing from most links."""
        return []

    @abstractmethod
    def drop_all(self) -> None:
        """Let go of all requests, whatever state an exception left; no event about them follows."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether :meth:`work` would do anything, or :meth:`events` give anything."""

    @abstractmethod
    def check_idle(self) -> bool:
        """Whether nothing has moved in the stage since this was asked before.

        A turn without an output need not mean that: a long prompt takes several steps, and a
        vocoder many to one piece of sound. Stages count the steps in which they had work.
        """

    @abstractmethod
    def notify(self, on_event: Callable[[], object]) -> None:
        """Have a function called, in any thread, when :attr:`has_work` may have become true."""

    def prepare_aside(self) -> None:  # noqa: B027 - workers elsewhere always do
        """Have requests made ready in other threads from now on, so that no work waits for it."""

    def close(self) -> None:  # noqa: B027 - workers elsewhere are their stage's to end
        """Let go of what the link itself has; the stage is closed by its pipeline."""
