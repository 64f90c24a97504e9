"""Processes that run a function, forked from one that has imported what they need."""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from engine.interface.log_fields import package_logger
from stages.remote.keeper import Keeper, ZygoteGone
from stages.remote.start_order import StartOrder

__all__ = ["WorkerProcess", "shut_down", "start_worker", "warm_up"]

_LOG = package_logger(__name__)
_NUMBERS = itertools.count()
_TOLD_WITHIN_S = 10.0
"""Of a killed worker's end: by the process that it was forked from, which may hang."""


class WorkerProcess:
    """A process that was started by :func:`start_worker`.

    Attributes:
        name: as given.
        pid: its process id. It may be another process's once this one has ended.
        sock: connected to the socket that its function got; it is the holder's to close.
    """

    def __init__(self, name: str, sock: socket.socket) -> None:
        self.name, self.sock = name, sock
        self.pid = 0
        self._process_fd: int | None = None
        self._lock = threading.Lock()
        self._has_ended = threading.Event()
        self._reason: str | None = None
        self._callbacks: list[Callable[[str], object]] = []

    def __repr__(self) -> str:
        return f"WorkerProcess({self.name!r}, pid {self.pid}, {self._reason or 'running'})"

    @property
    def exit_reason(self) -> str | None:
        """What it died of, such as ``"was killed by SIGKILL"``; None while it lives."""
        return self._reason

    def on_exit(self, callback: Callable[[str], object]) -> None:
        """Have a function called once with the exit reason: from another thread, or at once."""
        with self._lock:
            if self._reason is None:
                self._callbacks.append(callback)
                return
        callback(self._reason)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended; whether it has."""
        return self._has_ended.wait(timeout_s)

    def kill(self) -> None:
        """End it at once. Nothing happens if it has ended."""
        self._signal(signal.SIGKILL)

    def terminate(self, grace_s: float) -> None:
        """Ask it to end, and kill it if it has not ended in time; back when it is gone.

        Args:
            grace_s: how long it may take.
        """
        self._signal(signal.SIGTERM)
        if not self.wait(grace_s):
            self.kill()
            if not self.wait(_TOLD_WITHIN_S):
                _LOG.error("%r was killed, but its end was not reported", self)

    def _signal(self, number: signal.Signals) -> None:
        with self._lock, suppress(ProcessLookupError):
            if self._reason is not None:
                return
            if self._process_fd is None:
                os.kill(self.pid, number)
            else:
                signal.pidfd_send_signal(self._process_fd, number)

    def _began(self, pid: int, process_fd: int | None) -> None:
        with self._lock:
            self.pid, self._process_fd = pid, process_fd
            if self._reason is not None:
                self._close()

    def _ended(self, reason: str) -> None:
        with self._lock:
            self._reason = reason
            self._close()
            callbacks, self._callbacks = self._callbacks, []
        self._has_ended.set()
        for callback in callbacks:
            callback(reason)

    def _close(self) -> None:
        if self._process_fd is not None:
            os.close(self._process_fd)
            self._process_fd = None


class _Nursery:
    """The zygote of this process, if it has one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keeper: Keeper | None = None

    def keeper(self) -> Keeper:
        """The keeper of a zygote that lives, as far as is known."""
        with self._lock:
            if self._keeper is None or self._keeper.is_gone:
                self._keeper = Keeper()
            return self._keeper

    def close(self) -> None:
        """End the zygote and its workers."""
        with self._lock:
            if self._keeper is not None:
                self._keeper.stop()


_NURSERY = _Nursery()


def _forget() -> None:
    global _NURSERY
    _NURSERY = _Nursery()


def shut_down() -> None:
    """End all workers of this process, and the one that they are forked from. Another may start."""
    _NURSERY.close()


atexit.register(shut_down)
# A fork of this process has neither the thread nor the right to the zygote.
os.register_at_fork(after_in_child=_forget)


def warm_up() -> None:
    """Begin to start the process that workers are forked from; returns at once."""
    _NURSERY.keeper()


def start_worker(target: str, argument: bytes, *, threads: int, name: str) -> WorkerProcess:
    """Start a process that calls a function, in this process's surroundings as they are now.

    It has this process's environment, working directory, ``sys.path``, stdout and stderr, no stdin,
    no other descriptor and no other module than what engines need; the main script is not run in
    it. SIGINT does nothing to it. It ends when the function returns or raises, and when this
    process ends in whatever way.

    Args:
        target: ``"package.module:function"``, called as ``function(sock, argument)`` with its end
            of :attr:`WorkerProcess.sock`, a socket of ``AF_UNIX``.
        argument: for the function.
        threads: of torch.
        name: of the process.

    Raises:
        ValueError: the target is not written like that, or there is not one thread at least.
        RuntimeError: no process can be started.
    """
    module, _, function = target.partition(":")
    if not module or not function.isidentifier():
        raise ValueError(f"target must be 'package.module:function', got {target!r}")
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    entries: list[object] = [*sys.path]  # Python passes over what is no str
    order = StartOrder(
        next(_NUMBERS),
        target,
        argument,
        threads,
        name,
        list(os.environb.items()),
        _working_directory(),
        [os.fsencode(entry) for entry in entries if isinstance(entry, str)],
    )
    ours, theirs = socket.socketpair()
    worker = WorkerProcess(name, ours)
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        fds = (theirs.fileno(), *(fd if _is_open(fd) else nothing for fd in (1, 2)))
        try:
            started = _NURSERY.keeper().start(order, fds, worker._ended)
        except ZygoteGone:  # it had ended unnoticed; a new one is started, once
            started = _NURSERY.keeper().start(order, fds, worker._ended)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
        os.close(nothing)
    worker._began(*started)
    return worker


def _working_directory() -> bytes | None:
    try:
        return os.getcwdb()
    except FileNotFoundError:  # it was removed
        return None


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
