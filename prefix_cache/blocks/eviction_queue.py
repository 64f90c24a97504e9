"""What waits to be evicted, in the order in which it will be."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from prefix_cache.blocks.block import EvictionKey

__all__ = ["NUM_PRIORITIES", "EvictionQueue"]

NUM_PRIORITIES = 2
"""Priority 0 is evicted before anything of priority 1, whatever their times."""


class _Evictable(Protocol):
    key: EvictionKey


T = TypeVar("T", bound=_Evictable)


class EvictionQueue(Generic[T]):
    """Members by their key. Keys must grow within a priority from one ``append`` to the next.

    Every operation is O(1), removal from the middle, as by a hit, included.
    """

    def __init__(self) -> None:
        self._queues: tuple[OrderedDict[int, T], ...] = tuple(
            OrderedDict() for _ in range(NUM_PRIORITIES)
        )

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __iter__(self) -> Iterator[T]:
        """From what is evicted first to what is evicted last."""
        for queue in self._queues:
            yield from queue.values()

    def __contains__(self, member: T) -> bool:
        return id(member) in self._queues[member.key[0]]

    @property
    def first(self) -> T | None:
        """What is evicted next, or None."""
        for queue in self._queues:
            if queue:
                return next(iter(queue.values()))
        return None

    def append(self, member: T) -> None:
        """Put a member last in its priority."""
        self._queues[member.key[0]][id(member)] = member

    def remove(self, member: T) -> None:
        """Take a member from wherever it is. ``KeyError`` when it is not here."""
        del self._queues[member.key[0]][id(member)]
