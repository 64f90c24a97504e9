"""Starts processes that run a function, forked from a server with preloaded imports.

Forking takes milliseconds where importing takes seconds, and workers share the memory of the
imported modules. That is safe as long as the server has one thread and no state that does not
survive a fork: no thread pool, no CUDA. ::

    this process                    fork server              worker
    start_worker ── descriptors ──► fork ──────────────────► target(socket, argument)
         │                                 ▲ order, in an unnamed file
         └◄── status pipe: pid, then the exit status ────────┘

If one of the three dies, those to its right die with it, even if stopped: Linux kills them, and
elsewhere they notice the end of a socket. The fork server of ``multiprocessing`` does not do that:
its workers keep it alive, so both outlive a killed parent. It also runs the main script again in
every worker.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import random
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import msgspec

from engine.interface.log_fields import package_logger

_LOG = package_logger(__name__)
_START_TIMEOUT_S = 300.0
"""Timeout of a fork. The first one waits for the server's imports, maybe on a busy machine."""

_STOP_TIMEOUT_S = 10.0
_REPORT_TIMEOUT_S = 10.0
"""Timeout of the server's report that a killed worker has ended; the server may hang."""

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from stages.remote.fork_server import main; "
    "main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])"
)
_PRELOADED = (
    "engine.llm.llm_engine",
    "engine.encoder.encoder_engine",
    "engine.generator.generator_engine",
    "stages",
    "stages.remote.worker",
)
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_STATUS = struct.Struct("=i")
_NUM_FDS = 5


class _Order(msgspec.Struct, frozen=True):
    """Description of a worker's process; see :func:`start_worker`."""

    target: str
    argument: bytes
    threads: int
    name: str
    environment: list[tuple[bytes, bytes]]
    folder: bytes | None
    import_path: list[bytes]


class _ServerGone(RuntimeError):
    """The fork server has ended; the message is the reason."""


class _Server:
    """A fork server of this process, and the thread that starts it and waits for its end.

    Linux kills a child when the *thread* that started it ends, so the thread must stay alive.
    """

    def __init__(self) -> None:
        self._sock, self._server_sock = socket.socketpair()
        self._lock = threading.Lock()  # guards writes to the socket
        self._process: subprocess.Popen[bytes] | None = None
        self.end: str | None = None  # reason for its end, phrased to follow a worker's name
        self._is_started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fork server", daemon=True)
        self._thread.start()

    def wait_for_end(self) -> str:
        """Wait until the server has ended; return the reason."""
        self._thread.join()
        assert self.end is not None, "its thread has ended"
        return self.end

    def fork(self, fds: Sequence[int]) -> None:
        """Request the fork of a worker.

        Args:
            fds: its socket, stdout, stderr, order and the write end of its status pipe; the caller
                keeps ownership.

        Raises:
            _ServerGone: the server has ended.
        """
        self._is_started.wait()
        try:
            with self._lock:
                socket.send_fds(self._sock, [b"w"], fds)
        except OSError as error:
            raise _ServerGone(self.wait_for_end()) from error

    def stop(self) -> None:
        """End the server and all of its workers."""
        self._is_started.wait()
        with suppress(OSError):  # it has already ended
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(_STOP_TIMEOUT_S)
        if self._process is not None and self._thread.is_alive():
            self._process.kill()
        self._thread.join()

    def _run(self) -> None:
        fd = self._server_sock.fileno()
        arguments = [json.dumps(import_path()), str(fd), str(os.getpid()), *_PRELOADED]
        program = [sys.executable, "-P", "-c", _PROGRAM, *arguments]
        environment = {**os.environ, **dict.fromkeys(_ONE_THREAD, "1")}
        # The default check for CUDA initializes the driver, which does not survive a fork.
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        try:
            self._process = subprocess.Popen(
                program, stdin=subprocess.DEVNULL, pass_fds=(fd,), env=environment
            )
        except OSError as error:
            end = f"the process that workers are forked from cannot be started: {error}"
            self._sock.close()
        self._server_sock.close()
        self._is_started.set()
        if self._process is not None:
            status = self._process.wait()
            reason = _exit_reason(-status if status < 0 else status << 8)
            end = f"died when the process that workers are forked from {reason}"
            with self._lock:
                self._sock.close()
        self.end = end


class WorkerProcess:
    """A process that was started by :func:`start_worker`.

    Attributes:
        pid: its process id, which the system may reuse once this process has ended.
        sock: connected to the socket that its function got; the holder must close it.
    """

    def __init__(self, name: str, sock: socket.socket, server: _Server, status_fd: int) -> None:
        self.name, self.sock = name, sock
        self._server = server
        self._status_fd = status_fd
        self._reading = threading.Lock()  # guards the status pipe
        self._lock = threading.Lock()  # guards the two fields below
        self.exit_reason: str | None = None
        self._process_fd: int | None = None
        try:
            self.pid = self._read_pid()
        except BaseException:
            os.close(status_fd)
            raise
        with suppress(AttributeError, OSError):  # no pidfd on this system, or it has ended
            self._process_fd = os.pidfd_open(self.pid)

    def __repr__(self) -> str:
        return f"WorkerProcess({self.name!r}, pid {self.pid}, {self.exit_reason or 'running'})"

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process has ended; return True if it has."""
        end_s = time.monotonic() + timeout_s
        if not self._reading.acquire(timeout=timeout_s):
            return self.exit_reason is not None
        try:
            if self.exit_reason is None and _is_ready(self._status_fd, end_s - time.monotonic()):
                status = os.read(self._status_fd, _STATUS.size)
                self._note_end(
                    _exit_reason(*_STATUS.unpack(status)) if status else self._server.wait_for_end()
                )
        finally:
            self._reading.release()
        return self.exit_reason is not None

    def kill(self) -> None:
        """Kill the process immediately. Does nothing if it has ended."""
        self._signal(signal.SIGKILL)

    def terminate(self, grace_s: float) -> None:
        """Send SIGTERM, then SIGKILL after the grace period; return when the process is gone."""
        self._signal(signal.SIGTERM)
        if not self.wait(grace_s):
            self.kill()
            if not self.wait(_REPORT_TIMEOUT_S):
                _LOG.error("%r was killed, but its end was not reported", self)

    def _read_pid(self) -> int:
        if not _is_ready(self._status_fd, _START_TIMEOUT_S):
            self._server.stop()
        content = os.read(self._status_fd, _STATUS.size)
        if not content:
            raise _ServerGone(self._server.wait_for_end())
        (pid,) = _STATUS.unpack(content)
        if pid < 0:
            raise RuntimeError(f"worker {self.name}: it cannot be forked: {os.strerror(-pid)}")
        return int(pid)

    def _note_end(self, reason: str) -> None:
        with self._lock:
            self.exit_reason = reason
            os.close(self._status_fd)
            if self._process_fd is not None:
                os.close(self._process_fd)

    def _signal(self, number: signal.Signals) -> None:
        with self._lock, suppress(ProcessLookupError):
            if self.exit_reason is not None:
                return
            if self._process_fd is None:
                os.kill(self.pid, number)
            else:
                signal.pidfd_send_signal(self._process_fd, number)


_server: _Server | None = None
_server_lock = threading.Lock()


def _running_server() -> _Server:
    """Return the server of this process; start a new one if none is known to be alive."""
    global _server
    with _server_lock:
        if _server is None or _server.end is not None:
            _server = _Server()
        return _server


def shut_down() -> None:
    """End all workers of this process and their fork server; a new server may be started later."""
    with _server_lock:
        if _server is not None:
            _server.stop()


def _reset_in_fork() -> None:
    """Drop the server in a fork of this process, which neither has its thread nor owns it."""
    global _server, _server_lock
    _server, _server_lock = None, threading.Lock()


atexit.register(shut_down)
os.register_at_fork(after_in_child=_reset_in_fork)


def start_worker(target: str, argument: bytes, *, threads: int, name: str) -> WorkerProcess:
    """Start a process that calls a function, in a copy of this process's current surroundings.

    It gets this process's environment, working directory, ``sys.path``, stdout and stderr, but no
    stdin, no other descriptors and only the modules that engines need; the main script is not run
    in it. It ignores SIGINT. It ends when the function returns or raises, and when this process
    ends for any reason.

    Args:
        target: ``"package.module:function"``, called as ``function(sock, argument)`` with its end
            of :attr:`WorkerProcess.sock`, an ``AF_UNIX`` socket.
        threads: number of torch threads.

    Raises:
        RuntimeError: no process can be started.
    """
    order = _Order(
        target,
        argument,
        threads,
        name,
        list(os.environb.items()),
        _working_directory(),
        [os.fsencode(entry) for entry in import_path()],
    )
    content = msgspec.msgpack.encode(order)
    try:
        return _fork(_running_server(), name, content)
    except _ServerGone:  # it had ended unnoticed; start a new one, once
        return _fork(_running_server(), name, content)


def _fork(server: _Server, name: str, order: bytes) -> WorkerProcess:
    ours, theirs = socket.socketpair()
    status_fd, their_status_fd = os.pipe()
    null_fd = os.open(os.devnull, os.O_WRONLY)
    try:
        standard = (fd if _is_open(fd) else null_fd for fd in (1, 2))
        try:
            with open(unnamed_file("omni-order"), "w+b") as file:
                file.write(order)
                file.seek(0)
                server.fork((theirs.fileno(), *standard, file.fileno(), their_status_fd))
        except BaseException:
            os.close(status_fd)
            raise
        finally:
            theirs.close()
            os.close(their_status_fd)
            os.close(null_fd)
        return WorkerProcess(name, ours, server, status_fd)
    except BaseException:
        ours.close()
        raise


def unnamed_file(name: str) -> int:
    """Open an unnamed file, in memory if possible: an order's environment may hold secrets.

    Args:
        name: shown by the system to those who look at this process's descriptors.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    fd, path = tempfile.mkstemp(prefix=f"{name}-")
    os.unlink(path)
    return fd


def import_path() -> list[str]:
    """Return the directories in which this process finds modules."""
    entries: list[object] = [*sys.path]  # Python ignores entries that are no str
    return [entry for entry in entries if isinstance(entry, str)]


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


def _is_ready(fd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def _exit_reason(status: int) -> str:
    """Describe a status from ``os.waitpid``, for example ``"was killed by SIGKILL"``."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


# The code below runs in the fork server and its workers.

_SET_PARENT_DEATH_SIGNAL = 1
_SET_NAME = 15
_SOCKET, _ORDER = 3, 4
"""Descriptors of a worker in addition to the standard ones."""


def main(control_fd: int, parent: int, preloaded: Sequence[str]) -> NoReturn:
    """Fork workers when the parent requests it over a socket, until the parent is gone."""
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C for all
    control = socket.socket(fileno=control_fd)
    for name in preloaded:
        with suppress(Exception):  # it fails again in the worker, which reports it
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # keeps the collector from writing to shared pages
    status_fds: dict[int, int] = {}  # by process id
    try:
        _serve(control, status_fds)
    finally:
        for pid in status_fds:
            os.kill(pid, signal.SIGKILL)
        for pid in status_fds:
            os.waitpid(pid, 0)
        os._exit(0)


def _die_with(parent: int) -> None:
    """Have this process killed when its parent ends, even if this process is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def _serve(control: socket.socket, status_fds: dict[int, int]) -> None:
    """Fork and reap workers until the parent's end of the socket is closed."""
    wakeup_read, wakeup_write = os.pipe()
    for fd in (wakeup_read, wakeup_write):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(wakeup_read, select.POLLIN)
    poll.register(control, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if wakeup_read in ready:
            os.read(wakeup_read, 4096)
            _reap(status_fds)
        if control.fileno() in ready:
            content, fds, _, _ = socket.recv_fds(control, 1, _NUM_FDS)
            if not content:
                return
            _start(control, fds, status_fds)


def _reap(status_fds: dict[int, int]) -> None:
    while status_fds:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        _report(status_fds[pid], status)
        os.close(status_fds.pop(pid))


def _report(status_fd: int, number: int) -> None:
    with suppress(BrokenPipeError):  # the reader is gone
        os.write(status_fd, _STATUS.pack(number))


def _start(control: socket.socket, fds: Sequence[int], status_fds: dict[int, int]) -> None:
    *worker_fds, status_fd = fds
    server = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        _report(status_fd, -(error.errno or 1))
        os.close(status_fd)
    else:
        if not pid:
            control.detach()  # closed with all other descriptors, so not by its finalizer
            _run_worker(worker_fds, server)
        status_fds[pid] = status_fd
        _report(status_fd, pid)
    for fd in worker_fds:
        os.close(fd)


def _run_worker(fds: Sequence[int], server: int) -> NoReturn:
    status = 1
    try:
        _die_with(server)
        _drop_inherited(fds)
        sock = socket.socket(fileno=_SOCKET)
        with open(_ORDER, "rb") as file:
            order = msgspec.msgpack.decode(file.read(), type=_Order)
        _apply_order(order)
        module, _, function = order.target.partition(":")
        run = getattr(importlib.import_module(module), function)
        run(sock, order.argument)
        status = 0
    except SystemExit as exit_error:
        code = exit_error.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
        status = code if isinstance(code, int) else int(code is not None)
    except BaseException:  # nothing above this call could handle it
        traceback.print_exc()
    finally:
        # os._exit skips the exit handlers that the server's imports may have registered.
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status & 0xFF)


def _drop_inherited(fds: Sequence[int]) -> None:
    """Drop the server's descriptors and signal handlers, except those meant for the worker."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Duplicate to high numbers first: a received descriptor may have any of the target numbers.
    sock, out, err, order = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in fds)
    null_fd = os.open(os.devnull, os.O_RDONLY)
    for number, fd in enumerate((null_fd, out, err, sock, order)):
        os.dup2(fd, number, inheritable=number < _SOCKET)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.closerange(_ORDER + 1, limit if limit != resource.RLIM_INFINITY else 2**20)


def _apply_order(order: _Order) -> None:
    """Adopt the parent's environment, directory and import path as of its order."""
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
