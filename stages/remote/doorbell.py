"""Wakes a thread that polls, from anywhere."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress

__all__ = ["Doorbell"]


class _Pipe:
    """Closed when the last reference to it goes, and so never while a thread writes to it."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        for fd in (self.read_fd, self.write_fd):
            os.set_blocking(fd, False)
            weakref.finalize(self, os.close, fd).atexit = False


class Doorbell:
    """A descriptor that can be read from once any thread has rung.

    To ring takes no lock: it may be done by what is garbage-collected, in whatever thread, in the
    middle of whatever it does.
    """

    def __init__(self) -> None:
        self._pipe: _Pipe | None = _Pipe()
        self._is_rung = False

    def fileno(self) -> int:
        """The descriptor; -1 once it is closed."""
        return -1 if self._pipe is None else self._pipe.read_fd

    def ring(self) -> None:
        """Wake the thread, unless it is about to look anyway. Nothing happens once it is closed."""
        pipe = self._pipe
        if pipe is None or self._is_rung:
            return
        self._is_rung = True
        with suppress(BlockingIOError):  # it is full, and so has been rung
            os.write(pipe.write_fd, b"\0")

    def answer(self) -> None:
        """To be called before looking: who rings from now on rings again."""
        pipe = self._pipe
        if pipe is not None:
            with suppress(BlockingIOError):
                os.read(pipe.read_fd, 4096)
        self._is_rung = False

    def close(self) -> None:
        """Close it. May be called again."""
        self._pipe = None
