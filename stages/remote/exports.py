"""What a process has handed to a peer and the peer has not let go of."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stages.remote.doorbell import Doorbell
from stages.remote.imports import NUMBER
from stages.remote.remote_bytes import RemoteBytes
from stages.remote.segment import Segment
from stages.remote.segments import Place, SegmentPool, SharedBytes

__all__ = ["INLINE_BYTES", "Exports", "Shipment"]

INLINE_BYTES = 16 * 2**10
"""Up to here a copy through the socket is cheaper than a place in shared memory."""


class Shipment:
    """What one message hands over, until the message is on its way.

    Args:
        pool: where tensors of this process are placed.
        numbers: of exports; each is taken once.

    Attributes:
        items: by their numbers, what is handed over: places in the pool, and what other processes
            have placed, which is held for the peer.
        nbytes: of all of them.
    """

    def __init__(self, pool: SegmentPool, numbers: Iterator[int]) -> None:
        self._pool, self._numbers = pool, numbers
        self.items: dict[int, Place | SharedBytes] = {}
        self.nbytes = 0

    def share(self, content: NDArray[np.uint8] | Tensor | RemoteBytes) -> list[Any] | None:
        """Hand over what is large; see :data:`stages.remote.codec.Share`.

        Raises:
            MemoryError: there is no shared memory left.
        """
        item: Place | SharedBytes
        if isinstance(content, SharedBytes):
            item = content
        elif isinstance(content, RemoteBytes):
            return self.share(content.array())
        elif content.nbytes <= INLINE_BYTES:
            return None
        else:
            item = self._place(content)
        number = next(self._numbers)
        self.items[number] = item
        self.nbytes += item.nbytes
        return [number, item.segment.identity, item.offset, item.nbytes]

    def _place(self, content: NDArray[np.uint8] | Tensor) -> Place:
        place = self._pool.place(content.nbytes)
        try:
            if isinstance(content, Tensor):
                torch.from_numpy(place.content).copy_(content)
            else:
                place.content[:] = content
        except BaseException:
            place.free()
            raise
        return place

    def undo(self) -> None:
        """Take all back: nothing was sent."""
        for item in self.items.values():
            if isinstance(item, Place):
                item.free()
        self.items = {}


class Exports:
    """What a peer has. Not thread-safe, but for :meth:`shipment`.

    Args:
        pool: of this process.
        doorbell: rung when a segment that the peer knows is gone.
    """

    def __init__(self, pool: SegmentPool, doorbell: Doorbell) -> None:
        self._pool, self._doorbell = pool, doorbell
        self._numbers = itertools.count()
        self._items: dict[int, Place | SharedBytes] = {}
        self._known: dict[bytes, weakref.ref[Segment]] = {}
        self._gone: deque[bytes] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def shipment(self) -> Shipment:
        """For a message that is being made."""
        return Shipment(self._pool, self._numbers)

    def add(self, shipment: Shipment) -> list[Segment]:
        """Take over what a message hands over; the segments that the peer does not know yet."""
        self._items.update(shipment.items)
        new = {
            item.segment.identity: item.segment
            for item in shipment.items.values()
            if item.segment.identity not in self._known
        }
        for identity, segment in new.items():
            self._known[identity] = self._watch(segment)
        return list(new.values())

    def _watch(self, segment: Segment) -> weakref.ref[Segment]:
        identity, gone, doorbell = segment.identity, self._gone, self._doorbell

        def tell(_: object) -> None:
            gone.append(identity)
            doorbell.ring()

        return weakref.ref(segment, tell)

    def segments_gone(self) -> list[bytes]:
        """Segments that the peer knows and that no longer exist here; each is told once."""
        found = []
        while self._gone:
            identity = self._gone.popleft()
            del self._known[identity]
            found.append(identity)
        return found

    def release(self, content: bytes) -> None:
        """The peer has let go of some; see :meth:`stages.remote.imports.Imports.releases`.

        Raises:
            ValueError: it did not have one.
        """
        if len(content) % NUMBER.size:
            raise ValueError(f"{len(content)} bytes release exports")
        for (number,) in NUMBER.iter_unpack(content):
            item = self._items.pop(number, None)
            if item is None:
                raise ValueError(f"export {number} was released, and there is none")
            if isinstance(item, Place):
                item.free()

    def abandon(self) -> None:
        """Give up all places, since the peer is gone or not listened to: it may still read them."""
        items, self._items = self._items, {}
        for item in items.values():
            if isinstance(item, Place):
                item.abandon()
        self._known.clear()
        self._gone.clear()
