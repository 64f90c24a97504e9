"""Workers that run in threads of this process, and die on a test's command."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from stages.remote.codec import Decoder, encode
from stages.remote.messages import LinkMessage, WorkerMessage, WorkerSpec
from stages.remote.supervisor import Connection, NoPlaceError
from stages.remote.worker import Build, WorkerLoop, build_stage


class ThreadWorkers:
    """Starts workers in threads; every message crosses the codec, as between processes."""

    def __init__(self, build: Build = build_stage) -> None:
        self._build = build
        self.alive: dict[str, _ThreadConnection] = {}
        self.started: list[str] = []
        self.has_place = True

    def connect(
        self, spec: WorkerSpec, on_message: Callable[[Any], None], on_end: Callable[[str], None]
    ) -> Connection:
        """See :class:`~stages.remote.supervisor.Connect`."""
        if not self.has_place:
            raise NoPlaceError("no node has what it needs")
        self.started.append(spec.label)
        connection = _ThreadConnection(spec, on_message, on_end, self._build)
        connection.start()
        self.alive[spec.label] = connection
        return connection

    def kill(self, label: str) -> None:
        """End a worker between two messages."""
        self.alive[label].kill("was killed by a test")

    def join(self) -> None:
        """Wait for the threads of all workers that have ended."""
        for connection in self.alive.values():
            connection.thread.join(60)
            assert not connection.thread.is_alive()


class _ThreadConnection(Connection):
    def __init__(
        self,
        spec: WorkerSpec,
        on_message: Callable[[Any], None],
        on_end: Callable[[str], None],
        build: Build,
    ) -> None:
        self._decoder = Decoder(LinkMessage | WorkerMessage)
        self._on_message, self._on_end = on_message, on_end
        self._lock = threading.RLock()
        self._is_over = False
        self._reason = "ended"
        self.loop = WorkerLoop(spec, self._hear, build)
        self.thread = threading.Thread(target=self._run, name=f"worker {spec.label}", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def send(self, message: Any) -> None:
        if self._is_over:
            raise ConnectionError("it has ended")
        self.loop.take(self._decoder.decode(encode(message)))

    def kill(self, reason: str) -> None:
        self._finish(reason)
        self.loop.end()

    def close(self, grace_s: float) -> None:
        self.kill("was closed")

    def _run(self) -> None:
        try:
            self.loop.run()
        except ConnectionError:
            return
        self._finish("ended with exit status 0")

    def _hear(self, message: Any) -> None:
        with self._lock:
            if self._is_over:
                raise ConnectionError("nobody listens")
            self._on_message(self._decoder.decode(encode(message)))

    def _finish(self, reason: str) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self._on_end(reason)
