"""Tensors in shared memory: the pool in which a sender places them, and what a reader gets.

A pool places many tensors in few large segments, since descriptors are scarce::

    segment 0   |aaaaaaaa|bbb|........|cccccccccccc|..................|    32 MiB or more
                 placed   placed  free, its pages     free, never used:
                                  kept for the next   takes no memory

Pages are kept when a place becomes free, here and in the readers' mappings: the next tensor that is
placed there costs its copy and nothing more. What lies idle beyond a limit is given back.

A reader gets handles. Shape, dtype and size are known by them; the tensor is made on demand, over
the memory itself. A place is free when the last of its tensors and handles are gone::

    SharedTensor ──► SharedBytes ◄── numpy's array ◄── torch's storage ◄── tensors, views, slices
                         │ when it is garbage-collected
                         ▼
                      a release to the sender
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stages.remote.arena import Arena
from stages.remote.remote_bytes import RemoteBytes
from stages.remote.segment import PAGE_BYTES, Segment

__all__ = ["Place", "SegmentPool", "SharedBytes", "SharedTensor", "SharedTensors"]


class Place:
    """Where something lies in a pool, until it is freed or abandoned, once.

    Attributes:
        segment: the memory.
        offset: of the first byte there.
        nbytes: how many.
    """

    __slots__ = ("_arena", "_pool", "nbytes", "offset", "segment")

    def __init__(self, pool: SegmentPool, arena: Arena, offset: int, nbytes: int) -> None:
        self._pool, self._arena = pool, arena
        self.segment, self.offset, self.nbytes = arena.segment, offset, nbytes

    @property
    def content(self) -> NDArray[np.uint8]:
        """``(nbytes,)``, to be written."""
        return self.segment.content[self.offset : self.offset + self.nbytes]

    def free(self) -> None:
        """Let it be used again: nobody reads here any more."""
        self._pool._give_back(self._arena, self.offset, self.nbytes, may_be_read=False)

    def abandon(self) -> None:
        """Give it up though somebody may still read here: the memory is never written again."""
        self._pool._give_back(self._arena, self.offset, self.nbytes, may_be_read=True)


class SegmentPool:
    """Places for what a process hands to others. Safe to use from any thread.

    Args:
        segment_bytes: size of a segment; what is larger gets one of its own, of a power of two.
        max_idle_bytes: memory that may lie unused, kept for what comes next.

    Raises:
        ValueError: segments would not be whole pages, a power of two of bytes.
    """

    def __init__(
        self, *, segment_bytes: int = 32 * 2**20, max_idle_bytes: int = 256 * 2**20
    ) -> None:
        if segment_bytes < PAGE_BYTES or segment_bytes & (segment_bytes - 1):
            raise ValueError(
                f"segment_bytes must be a power of two, {PAGE_BYTES} at least, got {segment_bytes}"
            )
        self._segment_bytes, self._max_idle_bytes = segment_bytes, max_idle_bytes
        self._lock = threading.Lock()
        self._arenas: list[Arena] = []
        self._live_bytes = 0
        self._memory_bytes = 0

    @property
    def num_segments(self) -> int:
        """Segments, in use or not; two descriptors each."""
        return len(self._arenas)

    @property
    def live_bytes(self) -> int:
        """Of what is placed, in whole pages."""
        return self._live_bytes

    @property
    def idle_bytes(self) -> int:
        """Memory that is kept for what comes next."""
        return self._memory_bytes - self._live_bytes

    def place(self, nbytes: int) -> Place:
        """Find room, with memory behind it.

        Raises:
            MemoryError: a limit of the system is reached; the pool is as it was.
        """
        size = _whole_pages(nbytes)
        with self._lock:
            arena, start = self._find(size)
            try:
                _ = arena.segment.content  # it is mapped now or never
                self._memory_bytes += arena.take(start, size)
            except MemoryError:
                if not arena.num_places:
                    self._drop(arena)
                raise
            self._live_bytes += size
            return Place(self, arena, start, nbytes)

    def _find(self, size: int) -> tuple[Arena, int]:
        for arena in self._arenas:
            start = None if arena.is_retired else arena.find(size)
            if start is not None:
                return arena, start
        arena = Arena(Segment.create(max(self._segment_bytes, 1 << (size - 1).bit_length())))
        self._arenas.append(arena)
        return arena, 0

    def _give_back(self, arena: Arena, start: int, nbytes: int, *, may_be_read: bool) -> None:
        with self._lock:
            arena.is_retired |= may_be_read
            arena.give_back(start, _whole_pages(nbytes))
            self._live_bytes -= _whole_pages(nbytes)
            if arena.is_retired and not arena.num_places:
                self._drop(arena)
            if self.idle_bytes > self._max_idle_bytes:
                self._trim()

    def _trim(self) -> None:
        """Give idle memory back, the youngest segments' first; half, or it would be each time."""
        for arena in reversed(self._arenas.copy()):
            if self.idle_bytes <= self._max_idle_bytes // 2:
                return
            if not arena.num_places:
                self._drop(arena)
            elif not arena.is_retired:
                self._memory_bytes -= arena.drop_idle_pages()

    def _drop(self, arena: Arena) -> None:
        """Forget a segment without places. Its memory goes when the last reader drops it, too."""
        self._arenas.remove(arena)
        self._memory_bytes -= arena.memory_bytes


def _whole_pages(nbytes: int) -> int:
    return max(1, -(-nbytes // PAGE_BYTES)) * PAGE_BYTES


class SharedBytes(RemoteBytes):
    """What a reader has of a place in another process's pool.

    Args:
        segment: the memory.
        offset: of the first byte there.
        nbytes: how many.

    Attributes:
        segment, offset, nbytes: as given.

    Raises:
        ValueError: there are not so many bytes.
    """

    __slots__ = ("__weakref__", "nbytes", "offset", "segment")

    def __init__(self, segment: Segment, offset: int, nbytes: int) -> None:
        if not 0 <= offset <= offset + nbytes <= segment.size:
            raise ValueError(
                f"bytes {offset} to {offset + nbytes} are not in a segment of {segment.size}"
            )
        self.segment, self.offset, self.nbytes = segment, offset, nbytes

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """So numpy makes an array over the memory, which keeps this object."""
        address = self.segment.content.ctypes.data + self.offset
        return {"data": (address, False), "shape": (self.nbytes,), "typestr": "|u1", "version": 3}

    def array(self) -> NDArray[np.uint8]:
        """The bytes, ``(nbytes,)``, without a copy.

        Raises:
            MemoryError: there is no room for the mapping.
        """
        _ = self.segment.content  # numpy would take its error for a missing interface
        return np.asarray(self)


class SharedTensor:
    """A tensor whose bytes lie somewhere else.

    Attributes:
        source: where its bytes are.
        dtype, shape: of the tensor.

    Raises:
        ValueError: the bytes are too few or too many for the shape.
    """

    __slots__ = ("dtype", "shape", "source")

    def __init__(self, source: RemoteBytes, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        wanted = math.prod(shape) * dtype.itemsize
        if wanted != source.nbytes or any(side < 0 for side in shape):
            raise ValueError(f"{shape} of {dtype} cannot lie in {source.nbytes} bytes")
        self.source, self.dtype, self.shape = source, dtype, shape

    @property
    def nbytes(self) -> int:
        """Its size; the memory need not be mapped for that."""
        return self.source.nbytes

    def tensor(self) -> Tensor:
        """The tensor, over the memory itself. Others may read it too: it must not be changed."""
        return self.source.tensor().view(self.dtype).view(self.shape)


class SharedTensors(Mapping[str, Tensor]):
    """Tensors by their names; those in shared memory are mapped when they are asked for.

    Args:
        entries: small tensors as they are, others by their handles.
    """

    __slots__ = ("_entries", "_tensors")

    def __init__(self, entries: Mapping[str, Tensor | SharedTensor]) -> None:
        self._entries = dict(entries)
        self._tensors: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        found = self._tensors.get(name)
        if found is None:
            entry = self._entries[name]
            found = entry.tensor() if isinstance(entry, SharedTensor) else entry
            found = self._tensors.setdefault(name, found)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # without mapping it

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{name!r}: {tuple(entry.shape)} {entry.dtype}" for name, entry in self._entries.items()
        )
        return f"SharedTensors({{{shown}}})"

    @property
    def entries(self) -> Mapping[str, Tensor | SharedTensor]:
        """The tensors or their handles, which tell shapes and dtypes; nothing is mapped."""
        return self._entries

    @property
    def nbytes(self) -> int:
        """Size of all tensors; nothing is mapped."""
        return sum(entry.nbytes for entry in self._entries.values())
