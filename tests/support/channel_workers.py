"""Workers in threads of this process, reached as those in processes are: by sockets and memory."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any, cast

from stages.remote.channel import Channel, ChannelClosed
from stages.remote.connection import Connection
from stages.remote.control import WorkerSpec
from stages.remote.process_connection import ProcessConnection
from stages.remote.segments import SegmentPool
from stages.remote.wire import wire_codec
from stages.remote.worker_main import Build, WorkerLoop
from stages.remote.worker_process import WorkerProcess

__all__ = ["ChannelWorkers"]


class ChannelWorkers:
    """Starts workers in threads; messages and tensors cross channels, as between processes.

    Args:
        build: makes the stage of a worker.
    """

    def __init__(self, build: Build) -> None:
        self._build = build
        self._workers: list[_ThreadAsProcess] = []

    def connect(
        self, spec: WorkerSpec, on_message: Callable[[Any], None], on_end: Callable[[str], None]
    ) -> Connection:
        """See :class:`~stages.remote.connection.Connect`."""
        worker = _ThreadAsProcess(spec, self._build)
        self._workers.append(worker)
        return ProcessConnection(cast(WorkerProcess, worker), on_message, on_end)

    def join(self) -> None:
        """Wait for the threads of all workers, which have been told to end."""
        for worker in self._workers:
            assert worker.wait(60)


class _ThreadAsProcess:
    """What a connection needs of a :class:`~stages.remote.worker_process.WorkerProcess`."""

    pid = 0
    exit_reason = "ended with exit status 0"

    def __init__(self, spec: WorkerSpec, build: Build) -> None:
        self.name = spec.label
        self.sock, theirs = socket.socketpair()
        self._channel = Channel(theirs, wire_codec(), SegmentPool(), "the test")
        self._loop = WorkerLoop(spec, self._channel.send, build)
        self._thread = threading.Thread(target=self._run, name=f"worker {spec.label}", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def kill(self) -> None:
        self._channel.close()

    def terminate(self, grace_s: float) -> None:
        raise AssertionError(f"{self.name} did not end by itself")

    def _run(self) -> None:
        self._channel.start(self._loop.take, lambda reason: self._loop.end())
        try:
            self._loop.run()
            self._channel.wait_until_sent(60)
        except ChannelClosed:
            return
        finally:
            self._channel.close()
            self._channel.join(60)
