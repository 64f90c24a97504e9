"""A worker in a process of its own on this machine, and the channel to it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

from stages.remote.channel import Channel, ChannelClosed, wire_codec
from stages.remote.codec import Codec
from stages.remote.connection import Connection, WorkerGone
from stages.remote.control import WorkerSpec
from stages.remote.fork_server import WorkerProcess, start_worker
from stages.remote.segments import SegmentPool
from stages.remote.worker_log import forward_log
from stages.remote.worker_main import WorkerLoop, log_fields_of

__all__ = ["ProcessConnection", "connect_process", "worker_main"]

_POOL = SegmentPool()
"""Of this process, for all that it sends."""

_EXIT_PATIENCE_S = 5.0


def connect_process(
    spec: WorkerSpec, on_message: Callable[[Any], None], on_end: Callable[[str], None]
) -> Connection:
    """Start a worker in a process; see :class:`~stages.remote.connection.Connect`."""
    process = start_worker(
        f"{__name__}:worker_main",
        wire_codec().encode(spec),
        threads=spec.threads,
        name=f"omni {spec.label}",
    )
    try:
        return ProcessConnection(process, on_message, on_end)
    except BaseException:  # there are no descriptors left, or no threads
        process.sock.close()
        process.kill()
        raise


def worker_main(sock: socket.socket, argument: bytes) -> None:
    """What a worker's process runs.

    Args:
        sock: to the link.
        argument: the :class:`~stages.remote.control.WorkerSpec`.
    """
    codec = wire_codec()
    spec: WorkerSpec = codec.decode(argument)
    channel = Channel(sock, codec, SegmentPool(), "the pipeline")
    loop = WorkerLoop(spec, channel.send)
    channel.start(loop.take, lambda reason: loop.end())
    forward_log(channel.send, spec.log_level, log_fields_of(spec))
    try:
        loop.run()
        channel.wait_until_sent(_EXIT_PATIENCE_S)
    except ChannelClosed:
        return  # the pipeline is gone, or closed this stage
    finally:
        channel.close()


class ProcessConnection(Connection):
    """One worker in a process, and the channel to it.

    Args:
        process: that runs :func:`worker_main`, or another function that speaks as it does.
        on_message, on_end: see :class:`~stages.remote.connection.Connect`.
        codec: that it speaks; None for :func:`~stages.remote.channel.wire_codec`.
    """

    def __init__(
        self,
        process: WorkerProcess,
        on_message: Callable[[Any], None],
        on_end: Callable[[str], None],
        codec: Codec | None = None,
    ) -> None:
        self._process = process
        self._on_end = on_end
        self._killed_for: str | None = None
        self._is_closed = threading.Event()
        self._channel = Channel(process.sock, codec or wire_codec(), _POOL, process.name)
        self._channel.start(on_message, self._channel_ended)

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    def send(self, message: Any) -> None:
        """See :class:`~stages.remote.connection.Connection`."""
        try:
            self._channel.send(message)
        except ChannelClosed as error:
            raise WorkerGone(str(error)) from error

    def kill(self, reason: str) -> None:
        """See :class:`~stages.remote.connection.Connection`."""
        self._killed_for = reason
        self._process.kill()

    def close(self, grace_s: float) -> None:
        """See :class:`~stages.remote.connection.Connection`."""
        self._is_closed.set()
        self._channel.close()
        if not self._process.wait(grace_s):
            self._process.terminate(grace_s)
        self._channel.join(grace_s)

    def _channel_ended(self, reason: str) -> None:
        """All that the worker said has been heard; wait for what it died of."""
        if self._is_closed.is_set():
            return
        self._channel.close()
        if not self._process.wait(_EXIT_PATIENCE_S):
            self._process.kill()
            self._process.wait(_EXIT_PATIENCE_S)
        self._on_end(self._killed_for or self._process.exit_reason or reason)
