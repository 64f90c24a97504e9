"""Memory that processes share.

A segment has no name: it is known by its file descriptor, which is passed from process to process,
and by the mappings of it. It is gone with the last process that had it, however that one ends, and
nothing is left in ``/dev/shm``.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import threading
import weakref

import numpy as np
from numpy.typing import NDArray

__all__ = ["PAGE_BYTES", "Segment", "nothing_left"]

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
