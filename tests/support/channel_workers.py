"""Workers in threads of this process, reached like processes: by sockets and shared memory."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any, Protocol, cast

from stages.remote.channel import Channel, ChannelClosed
from stages.remote.fork_server import WorkerProcess
from stages.remote.messages import LinkMessage, WorkerSpec
from stages.remote.supervisor import Connection, ProcessConnection
from stages.remote.worker import Build, WorkerLoop


class ChannelWorkers:
    """Starts workers in threads; messages and tensors cross channels as between processes."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self.connections: list[Connection] = []
        self._workers: list[ThreadAsProcess] = []

    def connect(
        self, spec: WorkerSpec, on_message: Callable[[Any], None], on_end: Callable[[str], None]
    ) -> Connection:
        """See :class:`~stages.remote.supervisor.Connect`."""
        worker = ThreadAsProcess(
            spec.label, LinkMessage, lambda send: WorkerLoop(spec, send, self._build)
        )
        self._workers.append(worker)
        self.connections.append(ProcessConnection(cast(WorkerProcess, worker), on_message, on_end))
        return self.connections[-1]

    def join(self) -> None:
        """Wait for the threads of all workers; they must have been told to end."""
        for worker in self._workers:
            assert worker.wait(60)


class Loop(Protocol):
    """The main loop of a worker's process."""

    def take(self, message: Any) -> None: ...

    def end(self) -> None: ...

    def run(self) -> None: ...


class ThreadAsProcess:
    """The part of :class:`~stages.remote.fork_server.WorkerProcess` that a connection needs."""

    pid = 0
    exit_reason = "ended with exit status 0"

    def __init__(
        self, name: str, kinds: Any, make: Callable[[Callable[[object], None]], Loop]
    ) -> None:
        self.name = name
        self.sock, theirs = socket.socketpair()
        self._channel = Channel(theirs, kinds, "the test")
        self._loop = make(self._channel.send)
        self._thread = threading.Thread(target=self._run, name=f"worker {name}", daemon=True)
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
