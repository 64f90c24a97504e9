"""The parent's side of a zygote: the thread that has started it, and that hears what it tells."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from engine.interface.log_fields import package_logger
from stages.remote.doorbell import Doorbell
from stages.remote.frames import Frame, FrameKind, FrameReader, FrameWriter
from stages.remote.start_order import Exited, Started, StartOrder, exit_reason

__all__ = ["Keeper", "ZygoteGone"]

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
