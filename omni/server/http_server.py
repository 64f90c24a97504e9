"""Listens on a port, and stops gracefully."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from omni.server.app import create_app
from omni.server.serving.pipeline_server import PipelineServer
from omni.server.serving.settings import ServerSettings


def bind(settings: ServerSettings) -> socket.socket:
    """Take the port, so that one that is taken is found before anything is loaded.

    Raises:
        ValueError: it cannot be had.
    """
    host, port = settings.host, settings.port
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ValueError(f"--host {host!r} cannot be found: {error.strerror or error}") from error
    try:
        listener = socket.create_server(
            address, family=family, backlog=2048, dualstack_ipv6=family is socket.AF_INET6
        )
    except OSError as error:
        raise ValueError(_cannot_bind(host, port, error)) from error
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the address of a server that listens there."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer(uvicorn.Server):
    """A server of pipelines on a port; ``run`` serves until a signal comes, or :meth:`stop`.

    The first signal lets running requests finish, for as long as the limits say; the second ends
    them, each with an error that says why; the third does not even wait for that. The caller
    decides with which status the program then exits.

    ``on_start`` is called when connections are answered, and signals end the server well; only then
    pipelines are loaded. Running it raises what kept one from that. The listener, of :func:`bind`,
    is closed in the end.
    """

    def __init__(
        self,
        pipelines: PipelineServer,
        listener: socket.socket,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        limits = pipelines.settings.limits
        super().__init__(
            uvicorn.Config(
                create_app(pipelines),
                ws="websockets-sansio",
                ws_max_size=limits.max_body_bytes,
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=max(1, round(limits.stop_timeout_s)),
            )
        )
        self.pipelines = pipelines
        self.listener = listener
        self.on_start = on_start
        pipelines.on_failure = self.stop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_ending = False

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve in a loop that runs; signals are handled in the main thread only."""
        await super().serve(sockets or [self.listener])
        if self.pipelines.failure is not None:
            raise self.pipelines.failure

    def stop(self) -> None:
        """Let running requests finish, and end; from any thread."""
        self.pipelines.is_stopping = True
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer connections, then to load pipelines."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self.on_start()
            self.pipelines.start_loading()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal; uvicorn would raise those again that it notes itself."""
        if self.should_exit:
            if self._is_ending or self._loop is None:
                self.force_exit = True
            else:
                self._is_ending = True
                self._loop.call_soon_threadsafe(self._end_requests)
        self.stop()

    def _end_requests(self) -> None:
        for task in tuple(self.server_state.tasks):
            task.cancel()


def _cannot_bind(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use by another program; choose one with --port"
    if error.errno == errno.EACCES:
        return f"port {port} of {host} may not be used by this user; choose one above 1023"
    return f"port {port} of {host} cannot be used: {error.strerror or error}"
