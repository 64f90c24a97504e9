"""Link from an orchestrator to a stage, wherever that runs, and the state of its workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from stages.trace_events import Traced
from stages.worker.messages import Command, Event


@dataclass(frozen=True, slots=True)
class WorkerState:
    """State of one replica of a stage, and the history of its previous workers.

    Attributes:
        state: ``up`` accepts requests; ``starting`` will soon; ``waiting`` will when the cluster
            has resources for it again; ``down`` never will again.
        num_restarts: number of workers started to replace one that had ended.
        last_end: exit reason of the last ended worker, such as ``"was killed by SIGKILL"``.
        ended_at: time of that end, in seconds since 1970.
    """

    state: Literal["up", "starting", "waiting", "down"]
    num_restarts: int = 0
    last_end: str | None = None
    ended_at: float | None = None


def why_lost(workers: Sequence[WorkerState]) -> str | None:
    """Return why a stage accepts no requests, phrased to follow its name; None if it does."""
    if any(worker.state in ("up", "starting") for worker in workers):
        return None
    waits = "it takes no requests until there is a place for it"
    for worker in workers:
        if worker.state == "waiting":
            return f"{waits}: its worker {worker.last_end}"
    return f"it cannot be used any more: its worker {workers[0].last_end}"


class StageLink(ABC):
    """One stage's worker, or the connection to it.

    ``send`` and ``events`` never wait and never raise: an error of a request becomes an event about
    it. All methods are for one thread.

    ::

        send(command) ──► ...  the worker, in this thread or elsewhere  ... ──► events()
    """

    @abstractmethod
    def send(self, command: Command) -> None:
        """Send a command; commands take effect in call order."""

    def flush(self) -> None:  # noqa: B027 - links that execute commands at once need no flush
        """Deliver the commands sent so far; those of one flush arrive together."""

    def work(self) -> None:  # noqa: B027 - workers elsewhere work by themselves
        """Do one unit of work, if the stage is driven by the caller."""

    @abstractmethod
    def events(self) -> Sequence[Event | Traced]:
        """Return the events since the last call, and if traced, reports for the trace."""

    @abstractmethod
    def drop_all(self) -> None:
        """Drop all requests, whatever state an exception left; no event about them follows."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """True if :meth:`work` would do anything, or :meth:`events` return anything."""

    @abstractmethod
    def check_idle(self) -> bool:
        """Return True if the stage has made no progress since the last call.

        A turn without output is no proof of that: a long prompt takes several steps, and a vocoder
        many for one piece of audio. Stages count the steps in which they had work.
        """

    @abstractmethod
    def notify(self, on_event: Callable[[], object]) -> None:
        """Register a callback, called in any thread, for when :attr:`has_work` may become true."""

    def prepare_aside(self) -> None:  # noqa: B027 - workers elsewhere always do
        """Prepare requests in other threads from now on, so that no step waits for it."""

    def close(self) -> None:  # noqa: B027 - workers elsewhere are closed by their stage
        """Release the link's own resources; the pipeline closes the stage."""
