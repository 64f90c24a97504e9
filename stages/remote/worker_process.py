"""Processes that run a function, forked by a zygote that has imported what they need.

The keeper is the parent's side of a zygote: the thread that starts it and reads its messages.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from engine.interface.log_fields import package_logger
from stages.remote.channel import Doorbell, Frame, FrameKind, FrameReader, FrameWriter
from stages.remote.zygote import Exited, Started, StartOrder, exit_reason

__all__ = ["Keeper", "WorkerProcess", "ZygoteGone", "shut_down", "start_worker", "warm_up"]

_LOG = package_logger(__name__)
_MOST_BYTES = 2**20
_STARTS_WITHIN_S = 300.0
"""A zygote that takes longer hangs. Its first answer waits for imports, on a busy machine."""

_ENDS_WITHIN_S = 10.0

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from stages.remote.zygote import main; main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])"
)
_IMPORTED_FIRST = (
    "engine.llm.llm_engine",
    "engine.encoder.encoder_engine",
    "engine.generator.generator_engine",
    "stages",
    "stages.remote.channel",
    "stages.worker.stage_worker",
)

_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class ZygoteGone(RuntimeError):
    """The process that workers are forked from has ended; the message says of what."""


class _Worker:
    """What is known of one order."""

    def __init__(self, on_exit: Callable[[str], None]) -> None:
        self.on_exit = on_exit
        self.is_answered = threading.Event()
        self.started: Started | None = None
        self.fds: tuple[int, ...] = ()


class Keeper:
    """Starts a zygote and keeps it: one thread, for as long as this process or the zygote lasts.

    Linux kills a child when the *thread* that has started it ends, so the thread must stay.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._sock, self._theirs = socket.socketpair()
        self._sock.setblocking(False)
        self._reader = FrameReader(self._sock, _MOST_BYTES)
        self._doorbell = Doorbell()
        self._lock = threading.Lock()  # over all below
        self._writer = FrameWriter(self._sock)
        self._workers: dict[int, _Worker] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._gone: str | None = None
        self._thread = threading.Thread(target=self._run, name="zygote keeper", daemon=True)
        self._thread.start()

    @property
    def is_gone(self) -> bool:
        """Whether the zygote has ended, or is another process's."""
        return self._gone is not None or self._pid != os.getpid()

    @property
    def zygote_pid(self) -> int | None:
        """Of the zygote; None before it has one."""
        return None if self._process is None else self._process.pid

    def start(
        self, order: StartOrder, fds: Sequence[int], on_exit: Callable[[str], None]
    ) -> tuple[int, int | None]:
        """Have a worker forked.

        Args:
            order: whose number no other one has.
            fds: its socket, stdout and stderr; they stay the caller's.
            on_exit: called once it has ended, with what of, from this thread.

        Returns:
            Its process id, and a descriptor of the process if the system has such a thing.

        Raises:
            ZygoteGone: there is no zygote to fork it.
            RuntimeError: it cannot be forked.
        """
        worker = _Worker(on_exit)
        with self._lock:
            if self._gone is not None:
                raise ZygoteGone(self._gone)
            self._workers[order.number] = worker
            self._writer.put(FrameKind.START, msgspec.msgpack.encode(order), fds)
        self._doorbell.ring()
        if not worker.is_answered.wait(_STARTS_WITHIN_S):
            self.stop()
            worker.is_answered.wait()
        if worker.started is None:
            raise ZygoteGone(self._gone)
        if worker.started.error is not None:
            raise RuntimeError(f"worker {order.name}: {worker.started.error}")
        return worker.started.pid, worker.fds[0] if worker.fds else None

    def stop(self) -> None:
        """End the zygote, and with it all of its workers."""
        if self._pid == os.getpid():
            with suppress(OSError):  # it has ended by itself
                self._sock.shutdown(socket.SHUT_RDWR)
            self._thread.join()

    def _run(self) -> None:
        try:
            gone = self._keep()
        except (OSError, ValueError) as error:
            gone = f"the process that workers are forked from cannot be had: {error}"
        self._sock.close()
        self._theirs.close()
        if self._process is not None:
            gone = f"the process that workers are forked from {_end(self._process)}"
        with self._lock:
            self._gone = gone
            self._writer.clear()
            workers, self._workers = self._workers, {}
        self._reader.close()
        self._doorbell.close()
        for worker in workers.values():
            worker.is_answered.set()
            if worker.started is not None:
                _tell(worker, f"died when {gone}")

    def _keep(self) -> str:
        fd = self._theirs.fileno()
        entries: list[object] = [*sys.path]  # Python passes over what is no str
        path = json.dumps([entry for entry in entries if isinstance(entry, str)])
        arguments = [path, str(fd), str(os.getpid()), *_IMPORTED_FIRST]
        program = [sys.executable, "-P", "-c", _PROGRAM, *arguments]
        environment = {**os.environ, **dict.fromkeys(_ONE_THREAD, "1")}
        # Asked in the usual way whether there is CUDA, the driver begins what no fork survives.
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        self._process = subprocess.Popen(
            program, stdin=subprocess.DEVNULL, pass_fds=(fd,), env=environment
        )
        self._theirs.close()
        poll = select.poll()
        poll.register(self._doorbell.fileno(), select.POLLIN)
        while True:
            with self._lock:
                is_all = self._writer.flush()
            poll.register(self._sock, select.POLLIN | (0 if is_all else select.POLLOUT))
            poll.poll()
            self._doorbell.answer()
            if not self._reader.receive():
                return "it has ended"
            for frame in self._reader.frames():
                self._take(frame)

    def _take(self, frame: Frame) -> None:
        if frame.kind is FrameKind.STARTED:
            started = msgspec.msgpack.decode(frame.content, type=Started)
            worker = self._workers[started.number]
            worker.started, worker.fds = started, frame.fds
            if started.error is not None:
                del self._workers[started.number]
            worker.is_answered.set()
        elif frame.kind is FrameKind.EXITED:
            ended = msgspec.msgpack.decode(frame.content, type=Exited)
            with self._lock:
                worker = self._workers.pop(ended.number)
            _tell(worker, exit_reason(ended.status))


def _end(process: subprocess.Popen[bytes]) -> str:
    """Wait for a zygote that has been told to end, with its workers; what it died of."""
    try:
        status = process.wait(_ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait()
    return exit_reason(-status if status < 0 else status << 8)


def _tell(worker: _Worker, reason: str) -> None:
    try:
        worker.on_exit(reason)
    except Exception:  # others have workers here, too
        _LOG.exception("what follows the end of a worker failed")


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
