"""The process that workers are forked from: it has imported what they need, and has one thread.

::

    parent ── keeper thread ──► zygote ──► worker
                 │   START        │  fork    │  target(socket, argument)
                 │ ◄── STARTED ───┘          │
                 │ ◄── EXITED ◄── waitpid ───┘

To fork takes milliseconds where to import takes seconds, and workers share the memory of what was
imported. That is safe as long as there is one thread, and nothing yet that does not survive a
fork: no pool of threads, no CUDA. If one of the three dies, those to its right in the drawing die
with it: Linux kills them, and elsewhere the end of a socket tells them.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import gc
import importlib
import os
import random
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import msgspec

from stages.remote.channel import Frame, FrameKind, FrameReader, FrameWriter

__all__ = ["Exited", "StartOrder", "Started", "exit_reason", "main"]


class StartOrder(msgspec.Struct, frozen=True):
    """Fork a worker. With it come descriptors: its socket, its stdout, its stderr.

    Attributes:
        number: tells this worker from all others of the zygote.
        target: ``"package.module:function"``, called with the socket and the argument.
        argument: for the function.
        threads: of torch.
        name: what the process is called.
        environment: all of its variables.
        folder: its working directory; None leaves the zygote's.
        import_path: its ``sys.path``, in the encoding of the file system.
    """

    number: int
    target: str
    argument: bytes
    threads: int
    name: str
    environment: list[tuple[bytes, bytes]]
    folder: bytes | None
    import_path: list[bytes]


class Started(msgspec.Struct, frozen=True):
    """A worker was forked. With it may come a descriptor of the process.

    Attributes:
        number: of the order.
        pid: of the worker.
        error: why there is none.
    """

    number: int
    pid: int
    error: str | None = None


class Exited(msgspec.Struct, frozen=True):
    """A worker is gone.

    Attributes:
        number: of its order.
        status: as ``os.waitpid`` tells it.
    """

    number: int
    status: int


def exit_reason(status: int) -> str:
    """What a process died of, in words that go on after its name: ``"was killed by SIGKILL"``.

    Args:
        status: as ``os.waitpid`` tells it.
    """
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


_MOST_BYTES = 2**30
_SET_PARENT_DEATH_SIGNAL = 1
_SET_NAME = 15
_SOCKET = 3
"""The descriptor that a worker has beside its standard ones."""


def main(control_fd: int, parent: int, imported_first: Sequence[str]) -> NoReturn:
    """Fork workers as one is told, until the parent is gone.

    Args:
        control_fd: a socket to the parent.
        parent: its process id.
        imported_first: modules that no worker need import for itself.
    """
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # at Ctrl-C the parent decides what becomes of us
    control = socket.socket(fileno=control_fd)
    for name in imported_first:
        with suppress(Exception):  # what fails here fails again in the worker, which can tell
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector need not write to what is shared
    zygote = _Zygote(control)
    try:
        zygote.run()
    finally:
        zygote.kill_all()
        os._exit(0)


def _die_with(parent: int) -> None:
    """Be killed as soon as the parent is, stopped or not."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))
    if os.getppid() != parent:  # it was gone before
        os._exit(1)


class _Zygote:
    def __init__(self, control: socket.socket) -> None:
        control.setblocking(False)
        self._control = control
        self._reader, self._writer = FrameReader(control, _MOST_BYTES), FrameWriter(control)
        self._numbers: dict[int, int] = {}
        self._alarm, self._alarmed = socket.socketpair()
        for each in (self._alarm, self._alarmed):
            each.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._alarmed.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        """Until the parent's end of the socket is closed."""
        poll = select.poll()
        poll.register(self._alarm, select.POLLIN)
        while True:
            is_all = self._writer.flush()
            poll.register(self._control, select.POLLIN | (0 if is_all else select.POLLOUT))
            poll.poll()
            with suppress(BlockingIOError):
                self._alarm.recv(4096)
            self._reap()
            if not self._reader.receive():
                return
            for frame in self._reader.frames():
                self._start(frame)

    def _reap(self) -> None:
        while self._numbers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            self._put(FrameKind.EXITED, Exited(self._numbers.pop(pid), status))

    def _put(self, kind: FrameKind, told: msgspec.Struct) -> None:
        self._writer.put(kind, msgspec.msgpack.encode(told))

    def _start(self, frame: Frame) -> None:
        order = msgspec.msgpack.decode(frame.content, type=StartOrder)
        zygote = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._put(FrameKind.STARTED, Started(order.number, 0, f"it cannot be forked: {error}"))
            return
        finally:
            if os.getpid() == zygote:
                for fd in frame.fds:
                    os.close(fd)
        if not pid:
            # What these own is closed with all other descriptors, and not again with the objects.
            for each in (self._control, self._alarm, self._alarmed):
                each.detach()
            _be_worker(order, frame.fds, zygote)
        self._numbers[pid] = order.number
        self._announce(order.number, pid)

    def _announce(self, number: int, pid: int) -> None:
        """Tell of a worker. It is not reaped yet, so its id is its own."""
        told = msgspec.msgpack.encode(Started(number, pid))
        try:
            fd = os.pidfd_open(pid)
        except (AttributeError, OSError):  # there is no such thing here
            self._writer.put(FrameKind.STARTED, told)
            return
        self._writer.put(FrameKind.STARTED, told, (fd,))
        while not self._writer.flush():
            select.select([], [self._control], [])
        os.close(fd)

    def kill_all(self) -> None:
        """Leave no worker behind."""
        for pid in self._numbers:
            os.kill(pid, signal.SIGKILL)
        for pid in self._numbers:
            os.waitpid(pid, 0)


def _be_worker(order: StartOrder, fds: tuple[int, ...], zygote: int) -> NoReturn:
    status = 1
    try:
        _die_with(zygote)
        _leave_all_behind(fds)
        _look_like(order)
        module, _, function = order.target.partition(":")
        run = getattr(importlib.import_module(module), function)
        run(socket.socket(fileno=_SOCKET), order.argument)
        status = 0
    except SystemExit as leave:
        code = leave.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
        status = code if isinstance(code, int) else int(code is not None)
    except BaseException:  # nothing above this call could handle it
        traceback.print_exc()
    finally:
        # What the zygote has imported may have left things to do at exit, which are not ours.
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status & 0xFF)


def _leave_all_behind(fds: tuple[int, ...]) -> None:
    """Keep of the zygote's descriptors and signals only what is the worker's own."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Out of the way of those that are set now: a descriptor may have come as any number.
    sock, out, err = (_above(fd) for fd in fds)
    nothing = _above(os.open(os.devnull, os.O_RDONLY))
    for number, fd in enumerate((nothing, out, err, sock)):
        os.dup2(fd, number, inheritable=number < _SOCKET)
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.closerange(_SOCKET + 1, most if most != resource.RLIM_INFINITY else 2**20)


def _above(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64)


def _look_like(order: StartOrder) -> None:
    """Take over the parent's surroundings as they were when it asked for this worker."""
    import numpy as np
    import torch

    os.environb.clear()
    os.environb.update(order.environment)
    if order.folder is not None:
        os.chdir(order.folder)
    sys.path[:] = [os.fsdecode(entry) for entry in order.import_path]
    importlib.invalidate_caches()
    sys.argv[:] = [order.name]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_NAME, order.name.encode()[:15])
    random.seed()
    np.random.seed()
    torch.seed()
    torch.set_num_threads(order.threads)
    faulthandler.enable()
