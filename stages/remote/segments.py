"""Tensors in shared memory: the pool in which a sender places them, and what a reader gets.

A segment of shared memory has no name: processes pass its file descriptor on and map it. It is gone
with the last process that had it, however that one ends, and leaves nothing in ``/dev/shm``.

A pool places many tensors in few large segments, since descriptors are scarce::

    segment 0   |aaaaaaaa|bbb|........|cccccccccccc|..................|    32 MiB or more
                 placed   placed  free, its pages     free, never used:
                                  kept for the next   takes no memory

Pages are kept when a place becomes free, here and in the readers' mappings: the next tensor that is
placed there costs its copy and nothing more. What is idle beyond a limit is given back.

A reader gets handles. Shape, dtype and size are known by them; the tensor is made on demand, over
the memory itself. A place is free when the last of its tensors and handles are gone::

    SharedTensor ──► SharedBytes ◄── numpy's array ◄── torch's storage ◄── tensors, views, slices
                         │ when it is garbage-collected
                         ▼
                      a release to the sender
"""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
import tempfile
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "PAGE_BYTES",
    "Arena",
    "Place",
    "RemoteBytes",
    "Segment",
    "SegmentPool",
    "SharedBytes",
    "SharedTensor",
    "SharedTensors",
    "nothing_left",
]


class Arena:
    """Hands out ranges of a segment. Starts and sizes are whole pages, in bytes.

    Args:
        segment: all of it is free.

    Attributes:
        segment: as given.
        num_places: ranges that are taken.
        is_retired: whether no more ranges may be taken, since a reader that is gone or stuck may
            still read what was given back.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.num_places = 0
        self.is_retired = False
        self._free = [(0, segment.size)]  # in order; no two touch
        self._has_memory = np.zeros(segment.size // PAGE_BYTES, bool)

    @property
    def memory_bytes(self) -> int:
        """Of the pages that take memory."""
        return int(self._has_memory.sum()) * PAGE_BYTES

    def find(self, size: int) -> int | None:
        """The lowest free range that is large enough: so high pages may never be used at all."""
        return next((at for at, end in self._free if end - at >= size), None)

    def take(self, start: int, size: int) -> int:
        """Take a range that :meth:`find` found, with memory behind it; how much of that is new.

        Raises:
            MemoryError: there is none; nothing is taken.
        """
        pages = self._has_memory[start // PAGE_BYTES : (start + size) // PAGE_BYTES]
        missing = len(pages) - int(pages.sum())
        if missing:
            self.segment.reserve(start, size)
            pages[:] = True
        index = next(i for i, (at, _) in enumerate(self._free) if at == start)
        _, end = self._free.pop(index)
        if start + size < end:
            self._free.insert(index, (start + size, end))
        self.num_places += 1
        return missing * PAGE_BYTES

    def give_back(self, start: int, size: int) -> None:
        """Let a range that was taken be free; it is joined with its neighbours."""
        end = start + size
        before = [each for each in self._free if each[1] < start]
        after = [each for each in self._free if each[0] > end]
        for at, until in self._free[len(before) : len(self._free) - len(after)]:
            start, end = min(start, at), max(end, until)
        self._free = [*before, (start, end), *after]
        self.num_places -= 1

    def drop_idle_pages(self) -> int:
        """Give the memory behind free ranges back; how many bytes that were."""
        dropped = 0
        for start, end in self._free:
            pages = self._has_memory[start // PAGE_BYTES : end // PAGE_BYTES]
            if pages.any() and self.segment.drop_pages(start, end - start):
                dropped += int(pages.sum()) * PAGE_BYTES
                pages[:] = False
        return dropped


class RemoteBytes(ABC):
    """A handle on bytes, which can be passed on without looking at them.

    Attributes:
        nbytes: how many there are.
    """

    __slots__ = ()

    nbytes: int

    @abstractmethod
    def array(self) -> NDArray[np.uint8]:
        """The bytes, ``(nbytes,)``, on the host; they must not be changed.

        Raises:
            MemoryError: there is no room for them.
            RuntimeError: they are lost.
        """

    def tensor(self) -> Tensor:
        """The same, ``(nbytes,)`` uint8, on the device where this process has them."""
        return torch.from_numpy(self.array())


PAGE_BYTES = mmap.PAGESIZE

_NOTHING_LEFT = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.EDQUOT)


class Segment:
    """Shared memory, mapped when it is first looked into. It lasts as long as this object.

    Args:
        identity: 16 bytes by which all processes know it.
        fd: of the memory; the segment closes it.
        size: bytes.

    Attributes:
        identity, fd, size: as given.

    Raises:
        ValueError: the memory has another size. The descriptor is closed.
    """

    def __init__(self, identity: bytes, fd: int, size: int) -> None:
        self.identity, self.fd, self.size = identity, fd, size
        weakref.finalize(self, os.close, fd).atexit = False
        self._map: mmap.mmap | None = None
        self._content: NDArray[np.uint8] | None = None
        self._mapping = threading.Lock()
        there = os.fstat(fd).st_size
        if there != size or size < 1:
            raise ValueError(f"a segment of {size} bytes was announced, and it has {there}")

    @classmethod
    def create(cls, size: int) -> Segment:
        """Make one, full of zeros that take no memory yet.

        Raises:
            MemoryError: a limit of the system is reached.
        """
        try:
            fd = _unnamed_file()
            try:
                os.ftruncate(fd, size)
                _seal(fd)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise nothing_left(error, size) from error
        return cls(os.urandom(16), fd, size)

    @property
    def content(self) -> NDArray[np.uint8]:
        """All of it, ``(size,)``; any view of it keeps the mapping.

        Raises:
            MemoryError: there is no room for the mapping.
        """
        with self._mapping:
            if self._content is None:
                try:
                    self._map = mmap.mmap(self.fd, self.size)
                except OSError as error:
                    raise nothing_left(error, self.size) from error
                self._content = np.frombuffer(self._map, np.uint8)
            return self._content

    def reserve(self, start: int, size: int) -> None:
        """Have memory behind a range, so that to write there cannot fail.

        Raises:
            MemoryError: there is none.
        """
        if not hasattr(os, "posix_fallocate"):
            return
        try:
            os.posix_fallocate(self.fd, start, size)
        except OSError as error:
            raise nothing_left(error, size) from error

    def drop_pages(self, start: int, size: int) -> bool:
        """Give the memory behind a range back, and forget what was there; whether that can be."""
        if self._map is None or not hasattr(mmap, "MADV_REMOVE"):
            return False
        self._map.madvise(mmap.MADV_REMOVE, start, size)
        return True


def nothing_left(error: OSError, size: int) -> Exception:
    """The error as ``MemoryError`` if it means that a limit is reached; else as it is."""
    if error.errno not in _NOTHING_LEFT:
        return error
    return MemoryError(f"no shared memory for {size} bytes: {error.strerror}")


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("omni-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fd, path = tempfile.mkstemp(prefix="omni-segment-")
    os.unlink(path)
    return fd


def _seal(fd: int) -> None:
    """Keep everybody from making it shorter: to touch what was cut off kills a process."""
    if hasattr(fcntl, "F_ADD_SEALS") and hasattr(os, "memfd_create"):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


class Place:
    """A place in a pool, until it is freed or abandoned, once.

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
        """Let it be used again: it has no reader left."""
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
