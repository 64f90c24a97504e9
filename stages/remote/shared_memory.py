"""Tensors in shared memory: written once by their sender, mapped by each process that reads them.

All large contents of one message form one segment. A segment has no name: its file descriptor
travels with the message, and the system frees it when the last process that has it ends, however
that happens. Nothing is left in ``/dev/shm``. ::

    segment   |aaaaaaaa|bbb.|cccccccccccc|      each content begins at a multiple of 64 bytes

Fresh pages cost several times as much as a copy, so a sender keeps some segments for reuse. Each
message refers to the memory by a separate open file description that holds a lock on it. The system
releases the lock when its last descriptor and mapping is gone, in any process.

A reader gets handles, which know shape, dtype and size. The tensor is created on demand, without a
copy; the memory lives as long as any tensor, view or handle of it.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stages.remote.fork_server import unnamed_file

_ALIGNMENT = 64
_MAX_KEPT, _MAX_KEPT_BYTES = 16, 256 * 2**20
_MAX_OPEN = 256
"""Maximum number of received segments that are kept open. Descriptors are scarce."""


class RemoteBytes(ABC):
    """A handle on bytes, which can be forwarded without reading them."""

    __slots__ = ()

    nbytes: int

    @abstractmethod
    def array(self) -> NDArray[np.uint8]:
        """Return the bytes, ``(nbytes,)``, on the host; they must not be modified.

        Raises:
            MemoryError: there is not enough memory.
            RuntimeError: they are lost.
        """

    def tensor(self) -> Tensor:
        """Return the bytes, ``(nbytes,)`` uint8, on the device where this process has them."""
        return torch.from_numpy(self.array())


def aligned(nbytes: int) -> int:
    """Round up to the offset at which the next content may begin."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Descriptor:
    """A file descriptor, closed when the last reference to this object is gone."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd).atexit = False


class Segment:
    """Shared memory, mapped on first access; owns its descriptor."""

    def __init__(self, fd: int) -> None:
        self.file: Descriptor | None = Descriptor(fd)
        self.size = os.fstat(fd).st_size
        self._content: NDArray[np.uint8] | None = None
        self._lock = threading.Lock()

    @classmethod
    def write(cls, contents: Sequence[NDArray[np.uint8]]) -> Segment:
        """Create a segment of contents, each at the :func:`aligned` end of the previous one.

        Raises:
            OSError: a system limit is reached.
        """
        memory, start = _kept_memory(sum(content.nbytes for content in contents)), 0
        for content in contents:
            rest, at = content.data, start
            while rest:
                num_written = os.pwrite(memory.fd, rest, at)
                rest, at = rest[num_written:], at + num_written
            start = aligned(at)
        if not hasattr(os, "memfd_create"):
            return cls(os.dup(memory.fd))
        segment = cls(os.open(f"/proc/self/fd/{memory.fd}", os.O_RDWR | os.O_CLOEXEC))
        assert segment.file is not None
        fcntl.flock(segment.file.fd, fcntl.LOCK_SH)
        _keep(memory)
        return segment

    @classmethod
    def received(cls, fd: int) -> Segment:
        """Wrap a segment that another process sent."""
        segment = cls(fd)
        _received.append(weakref.ref(segment, _received.remove))
        while len(_received) > _MAX_OPEN:
            if (oldest := _received.popleft()()) is not None:
                oldest.detach()
        return segment

    @property
    def content(self) -> NDArray[np.uint8]:
        """All bytes, ``(size,)``; views keep the memory alive; ``MemoryError``: mapping failed."""
        with self._lock:
            if self._content is None:
                assert self.file is not None, "a detached one has its content"
                try:
                    mapped = mmap.mmap(self.file.fd, self.size)
                except OSError as error:
                    raise MemoryError(f"no room to map {self.size} bytes: {error}") from error
                self._content = np.frombuffer(mapped, np.uint8)
            return self._content

    def detach(self) -> None:
        """Close the descriptor; unless mapped, the content is copied into private memory."""
        with self._lock:
            if self._content is None and self.file is not None:
                self._content = np.fromfile(f"/dev/fd/{self.file.fd}", np.uint8)
            self.file = None


_received: deque[weakref.ref[Segment]] = deque()
_kept: deque[Descriptor] = deque()
_kept_lock = threading.Lock()


def _kept_memory(nbytes: int) -> Descriptor:
    """Return kept memory of about that size that no process uses any more, or new memory."""
    with _kept_lock:
        for memory in _kept:
            if nbytes <= os.fstat(memory.fd).st_size <= 4 * nbytes and _is_free(memory):
                _kept.remove(memory)
                return memory
    return Descriptor(unnamed_file("omni-segment"))


def _is_free(memory: Descriptor) -> bool:
    try:
        fcntl.flock(memory.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(memory.fd, fcntl.LOCK_UN)
    return True


def _keep(memory: Descriptor) -> None:
    """Keep memory for reuse, dropping the oldest beyond the limits."""
    with _kept_lock:
        _kept.append(memory)
        sizes = [os.fstat(each.fd).st_size for each in _kept]
        while len(_kept) > _MAX_KEPT or sum(sizes) > _MAX_KEPT_BYTES:
            _kept.popleft()
            del sizes[0]


class SharedBytes(RemoteBytes):
    """A byte range of a segment; ``ValueError``: the range exceeds the segment."""

    __slots__ = ("nbytes", "offset", "segment")

    def __init__(self, segment: Segment, offset: int, nbytes: int) -> None:
        if not 0 <= offset <= offset + nbytes <= segment.size:
            raise ValueError(
                f"bytes {offset} to {offset + nbytes} are not in a segment of {segment.size}"
            )
        self.segment, self.offset, self.nbytes = segment, offset, nbytes

    def array(self) -> NDArray[np.uint8]:
        """Return the bytes, ``(nbytes,)``, without a copy; ``MemoryError``: mapping failed."""
        return self.segment.content[self.offset : self.offset + self.nbytes]


class SharedTensor:
    """A tensor whose bytes are elsewhere; ``ValueError``: their number does not match its shape."""

    __slots__ = ("dtype", "shape", "source")

    def __init__(self, source: RemoteBytes, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        wanted = math.prod(shape) * dtype.itemsize
        if wanted != source.nbytes or any(side < 0 for side in shape):
            raise ValueError(f"{shape} of {dtype} are not {source.nbytes} bytes")
        self.source, self.dtype, self.shape = source, dtype, shape

    @property
    def nbytes(self) -> int:
        """Size in bytes, known without mapping the memory."""
        return self.source.nbytes

    def tensor(self) -> Tensor:
        """Return the tensor without a copy. It must not be modified: others may read it too."""
        return self.source.tensor().view(self.dtype).view(self.shape)


class SharedTensors(Mapping[str, Tensor]):
    """Tensors by name; ``entries`` in shared memory are mapped on access."""

    __slots__ = ("_tensors", "entries")

    def __init__(self, entries: Mapping[str, Tensor | SharedTensor]) -> None:
        self.entries = dict(entries)
        self._tensors: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        found = self._tensors.get(name)
        if found is None:
            entry = self.entries[name]
            found = entry.tensor() if isinstance(entry, SharedTensor) else entry
            found = self._tensors.setdefault(name, found)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self.entries  # without mapping it

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{name!r}: {tuple(entry.shape)} {entry.dtype}" for name, entry in self.entries.items()
        )
        return f"SharedTensors({{{shown}}})"
