"""HTTP listener with graceful shutdown."""

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
    """Bind the port early, so that a port in use is reported before any model is loaded.

    Raises:
        ValueError: the address cannot be resolved or bound.
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
    """Return the URL of a server on this listener."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer(uvicorn.Server):
    """Uvicorn server for pipelines; ``run`` serves until a signal or :meth:`stop`.

    The first signal lets running requests finish within the stop timeout of the limits; the second
    aborts them, each with an error that gives the reason; the third does not even wait for that.
    The caller chooses the exit status of the program.

    ``on_start`` is called once connections are accepted and signals are handled; pipelines load
    only after that. ``run`` raises the error of a pipeline that fails to load. The listener from
    :func:`bind` is closed at the end.
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
        """Serve in the running event loop; signals are handled in the main thread only."""
        await super().serve(sockets or [self.listener])
        if self.pipelines.failure is not None:
            raise self.pipelines.failure

    def stop(self) -> None:
        """Let running requests finish, then exit. Thread-safe."""
        self.pipelines.is_stopping = True
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections, then to load pipelines."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self.on_start()
            self.pipelines.start_loading()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal without recording it: uvicorn re-raises the signals it records."""
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
