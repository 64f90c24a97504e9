"""What a link needs of whatever runs its worker: a process, or an actor of a cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from stages.remote.control import WorkerSpec

__all__ = ["Connect", "Connection", "NoPlaceError", "WorkerGone"]


class WorkerGone(ConnectionError):
    """There is no worker at the other end any more."""


class NoPlaceError(ValueError):
    """There is no place for a worker at present; there may be one later."""


class Connection(ABC):
    """One worker's life, and the way to it. All methods may be called from any thread.

    Attributes:
        start_patience_s: seconds that it has at least until its first sign of life; while it builds
            its stage it gives such signs.
        has_no_place: whether it ended since there is no place for it at present.
    """

    start_patience_s: float = 30.0
    has_no_place: bool = False

    @property
    def pid(self) -> int | None:
        """The worker's process id, where this machine knows it."""
        return None

    @abstractmethod
    def send(self, message: Any) -> None:
        """Hand a command or a call over, without waiting for the worker.

        Raises:
            WorkerGone: it has ended.
            ValueError: the message holds what cannot be sent.
            MemoryError: there is no room for its tensors.
        """

    @abstractmethod
    def kill(self, reason: str) -> None:
        """End the worker now, whatever it does; ``on_end`` is then told this reason."""

    @abstractmethod
    def close(self, grace_s: float) -> None:
        """Have the worker end by itself, and end it if it has not after that many seconds."""


class Connect(Protocol):
    """Starts a worker."""

    def __call__(
        self,
        spec: WorkerSpec,
        on_message: Callable[[Any], None],
        on_end: Callable[[str], None],
    ) -> Connection:
        """Begin to start a worker, which says ``Built`` or ``NotBuilt`` before anything else.

        Args:
            spec: what it is to build.
            on_message: called with all that it says, in a thread of the connection.
            on_end: called once, after the last message, with what it died of.

        Raises:
            OSError: no worker can be started.
            NoPlaceError: not at present.
        """
        ...
