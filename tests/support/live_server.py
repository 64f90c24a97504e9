"""A real server on a free port, in a thread of the test."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self

import openai
from pydantic import SecretStr

from omni import Omni
from omni.pipelines.pipeline_config import PipelineConfig
from omni.server.http_server import HttpServer, bind, url_of
from omni.server.serving.pipeline_server import PipelineServer
from omni.server.serving.settings import ServerLimits, ServerSettings
from tests.support.patience import PATIENCE_S, wait_for


class LiveServer:
    """Serves until the ``with`` block ends."""

    def __init__(
        self,
        configs: Sequence[PipelineConfig | str],
        *,
        api_keys: Sequence[str] = (),
        allow_origins: Sequence[str] = (),
        allow_url_hosts: Sequence[str] = (),
        is_ready: bool = True,
        apart: bool = False,
        aliases: Mapping[str, str] | None = None,
        transcriber: str | None = None,
        **limits: float,
    ) -> None:
        loaded = [PipelineConfig.load(each) if isinstance(each, str) else each for each in configs]
        settings = ServerSettings(
            port=0,
            api_keys=tuple(map(SecretStr, api_keys)),
            allow_origins=tuple(allow_origins),
            allow_url_hosts=tuple(allow_url_hosts),
            aliases=dict(aliases or {}),
            transcriber=transcriber,
            limits=ServerLimits(**limits),
        )
        self.pipelines = PipelineServer(loaded, settings, apart=apart)
        self._http = HttpServer(self.pipelines, bind(settings))
        self.url = url_of(self._http.listener)
        self._is_ready = is_ready
        self._error: BaseException | None = None
        self._clients: list[openai.OpenAI] = []
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        wait_for(lambda: self._http.started or self._error is not None)
        if self._is_ready:
            wait_for(lambda: self.pipelines.status != "loading" or self._error is not None)
        return self

    def __exit__(self, *error: object) -> None:
        for client in self._clients:
            client.close()
        self.stop()
        self.join()

    def stop(self) -> None:
        """Begin shutting down."""
        self._http.stop()

    def join(self) -> None:
        """Wait for the end; raise the server's error, if any."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the server does not stop"
        error, self._error = self._error, None
        if error is not None:
            raise error

    def omni(self, name: str | None = None) -> Omni:
        """Return the ``Omni`` of a pipeline; the only one if no name is given."""
        return self.pipelines.find(name or next(iter(self.pipelines.pipelines))).omni

    def client(self, api_key: str = "none", **options: object) -> Any:
        """Return the official client, closed with the server; it never retries."""
        settings: dict[str, Any] = {"max_retries": 0, "timeout": PATIENCE_S, **options}
        made = openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, **settings)
        self._clients.append(made)
        return made

    def num_tasks(self) -> int:
        """Return the number of running coroutines in the server's event loop."""
        return len(asyncio.all_tasks(self._loop))

    def send_little_at_once(self) -> None:
        """Shrink the buffers between the server and a client that does not read."""
        self._http.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    def check_nothing_is_left(self) -> None:
        """Check that every request soon leaves every stage, and every block is accounted for."""
        for pipeline in self.pipelines.pipelines.values():
            wait_for(lambda each=pipeline: not each.queue.num_running)  # type: ignore[misc]
            assert not pipeline.queue.num_waiting
            wait_for(lambda each=pipeline.omni: _is_idle(each))  # type: ignore[misc]

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # raised by join()
            self._error = error

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._http.serve()


def _is_idle(omni: Omni) -> bool:
    try:
        with omni.paused() as pipeline:
            for stage in pipeline.stages.values():
                stage.check_integrity()
                kv = stage.stats().kv
                assert kv is None or not kv.held, f"{stage.name} holds {kv.held} pages"
    except RuntimeError:  # requests are running
        return False
    return True
