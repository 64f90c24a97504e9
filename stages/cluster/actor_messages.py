"""Messages on their way to and from an actor: bytes, and what is beside them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "Bundle",
    "Hello",
    "InOrder",
    "Outbox",
    "OutgoingMessage",
    "Unconfirmed",
]

_MOST_AT_ONCE = 64

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """An encoded message.

    Attributes:
        content: the message.
        beside: what it speaks of by number, in order. Tensors go directly from actor to actor.
    """

    content: bytes
    beside: tuple[NDArray[np.uint8] | Tensor, ...] = ()


class Hello(msgspec.Struct, frozen=True):
    """What an actor says first.

    Attributes:
        protocol: the version that it speaks.
        pid: its process.
        machine: where that is.
    """

    protocol: int
    pid: int
    machine: str


class Bundle(msgspec.Struct, frozen=True):
    """What an actor says at once. After it come the objects beside its messages, in order.

    Attributes:
        contents: of the messages.
        is_offered: of each, for all that is beside it, whether it is to be fetched directly; what
            is not comes after the bundle.
        num_taken: messages to the actor that have come so far, without a gap.
        hello: in the first one.
        ended: what ended the worker; nothing comes after it.
    """

    contents: list[bytes] = []
    is_offered: list[list[bool]] = []
    num_taken: int = 0
    hello: Hello | None = None
    ended: str | None = None


class Outbox:
    """Messages that wait to be taken. Safe to use from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: deque[OutgoingMessage] = deque()
        self._ended: str | None = None

    def put(self, message: OutgoingMessage) -> None:
        """Add one.

        Raises:
            ConnectionError: it has ended.
        """
        with self._changed:
            if self._ended is not None:
                raise ConnectionError(f"the actor has ended: {self._ended}")
            self._messages.append(message)
            self._changed.notify()

    def end(self, reason: str) -> None:
        """Nothing comes after what is there. May be called again, for nothing."""
        with self._changed:
            self._ended = self._ended or reason
            self._changed.notify()

    def take(self) -> tuple[list[OutgoingMessage], str | None]:
        """Wait for messages, and take what is there; and the reason, once nothing else comes."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._ended is not None)
            count = min(len(self._messages), _MOST_AT_ONCE)
            taken = [self._messages.popleft() for _ in range(count)]
            return taken, None if self._messages else self._ended


class InOrder(Generic[_Item]):
    """Gives numbered items in the order of their numbers, once, in whatever order they come."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, _Item] = {}

    def __len__(self) -> int:
        """How many wait for one that comes before them."""
        return len(self._early)

    def __contains__(self, number: int) -> bool:
        """Whether an item with that number has come."""
        return number < self._next or number in self._early

    @property
    def num_given(self) -> int:
        """How many have been given, and so have come without a gap."""
        return self._next

    def put(self, number: int, item: _Item) -> Iterator[_Item]:
        """Take one in; those whose turn it is. One that came before comes to nothing."""
        if number >= self._next:
            self._early[number] = item
        while self._next in self._early:
            yield self._early.pop(self._next)
            self._next += 1


class Unconfirmed(Generic[_Item]):
    """Keeps what has been sent until the other side says that it came, to send it again. ::

        sent 0 1 2 3 4 5     came 0 1 _ 3 4 _     confirmed: two; after a while 2 ... 5 are overdue

    Args:
        patience_s: after which something that was sent is overdue.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._items: dict[int, _Item] = {}  # in the order of their numbers
        self._sent_at: dict[int, float] = {}
        self._num_overdue = 0

    def add(self, number: int, item: _Item, now_s: float) -> None:
        """Something was sent, with the next number."""
        self._items[number] = item
        self._sent_at[number] = now_s

    def confirm(self, num_come: int) -> None:
        """So many have come: those with lower numbers are forgotten."""
        while (first := next(iter(self._items), num_come)) < num_come:
            del self._items[first], self._sent_at[first]
            self._num_overdue = 0

    def overdue(self, now_s: float) -> list[tuple[int, _Item]]:
        """What has to be sent again, by number; it counts as sent now."""
        due = [at for at, sent in self._sent_at.items() if now_s - sent > self._patience_s]
        self._sent_at.update(dict.fromkeys(due, now_s))
        self._num_overdue += bool(due)
        return [(number, self._items[number]) for number in due]

    @property
    def num_overdue(self) -> int:
        """How often in a row something was overdue, and nothing came."""
        return self._num_overdue
