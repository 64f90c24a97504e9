"""What runs the requests of an ``Omni``: in this process, or in one beside it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

from omni.requests.request import OmniOutput, OmniRequest

__all__ = ["LENT_HERE", "Runner", "Sink", "Ticket"]

LENT_HERE = (
    "the pipeline is lent to this thread (paused), and runs no requests until that ends: leave the "
    "with block first"
)
"""To a thread that would wait for requests."""

Sink: TypeAlias = Callable[[OmniOutput | BaseException], None]
"""Gets a request's outputs, in a thread of the runner; it must not block. What follows an output
that is finished, or an exception, does not count: a runner that was interrupted may say again that
a request is over."""


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """One submitted request; its id alone would not tell it from another caller's of that id."""

    request: OmniRequest
    request_id: str
    sink: Sink


class Runner(ABC):
    """Takes requests of any number of callers; all methods may be called from any thread."""

    @abstractmethod
    def submit(self, request: OmniRequest, request_id: str, sink: Sink) -> Ticket:
        """Hand in a request; one that cannot run gets a finished output with an error.

        Args:
            request: what to run.
            request_id: under which id.
            sink: gets its outputs.

        Raises:
            RuntimeError: it was stopped or has crashed.
        """

    @abstractmethod
    def together(self) -> AbstractContextManager[None]:
        """Have requests that are submitted meanwhile begin in one turn, none ahead of the others.

        So that they share batches, and that one id given twice is found out however fast they run.
        One that takes much longer to prepare than the others begins later.
        """

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """End a request: its sink gets a last output. An unknown id is ignored."""

    @abstractmethod
    def discard(self, tickets: Iterable[Ticket]) -> None:
        """End requests whose callers are gone; those that ended are ignored."""

    @abstractmethod
    def paused(self) -> AbstractContextManager[None]:
        """Hold new requests back while the caller has to do with the stages; requests queue up.

        Raises:
            RuntimeError: requests are running, the stages are another thread's at present, or this
                was stopped or has crashed.
        """

    @abstractmethod
    def check_can_wait(self) -> None:
        """Refuse to let a thread wait for outputs that come only after it has gone on.

        Raises:
            RuntimeError: it drives the stages, as the runner's own or because they are lent to it.
        """

    @abstractmethod
    def stop(self) -> None:
        """End all requests with an error, and whatever runs them. May be called again."""
