"""All pipelines of a server: loaded one after the other, found by name, closed together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING

from engine.interface.log_fields import package_logger
from engine.interface.suggestion import suggest
from omni.server.serving.api_error import ApiError
from omni.server.serving.meters import Meters
from omni.server.serving.request_spans import spans_by_environment
from omni.server.serving.served_pipeline import PipelineState, ServedPipeline
from omni.server.serving.url_fetcher import UrlFetcher

if TYPE_CHECKING:
    from omni.pipelines.pipeline_config import PipelineConfig
    from omni.server.serving.guard import Client
    from omni.server.serving.settings import ServerSettings

__all__ = ["PipelineServer"]

_logger = package_logger(__name__)


class PipelineServer:
    """All pipelines of a server.

    Args:
        configs: the pipelines; their names are the models' for clients.
        settings: of the server.
        apart: whether each pipeline whose stages run inline has a process of its own for them, so
            that what serves and what computes do not wait for one interpreter.

    Attributes:
        settings: as given.
        pipelines: by name.
        meters: what it tells of itself.
        fetcher: of files whose addresses stand in requests.
        num_sessions: realtime ones that are open.
        is_stopping: whether no more requests are taken.
        failure: why a pipeline could not be loaded.
        on_failure: called then, in the loading thread.
        on_loaded: called in that thread when all pipelines are ready.

    Raises:
        ValueError: there is none, or two have the same name.
    """

    def __init__(
        self, configs: Sequence[PipelineConfig], settings: ServerSettings, *, apart: bool = False
    ) -> None:
        if not configs:
            raise ValueError("a server needs at least one pipeline")
        self.settings = settings
        self.pipelines: dict[str, ServedPipeline] = {}
        for config in configs:
            if config.name in self.pipelines:
                raise ValueError(
                    f"two pipelines are named {config.name!r}; clients choose by name, so change "
                    "one with the key 'name' of its YAML file"
                )
            self.pipelines[config.name] = ServedPipeline(config, settings.limits, apart=apart)
        self.meters = Meters(self.pipelines.values())
        self.meters.spans = spans_by_environment()
        for pipeline in self.pipelines.values():
            pipeline.meters = self.meters
        limits = settings.limits
        self.fetcher = UrlFetcher(
            settings.allow_url_hosts,
            limits.max_url_bytes,
            limits.url_timeout_s,
            max(1, limits.max_waiting_requests),  # one waits even where none waits for its turn
        )
        self.num_sessions = 0
        self.is_stopping = False
        self.failure: Exception | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.on_loaded: Callable[[], None] = lambda: None
        self._loader = threading.Thread(target=self._load, name="omni-loader", daemon=True)

    @property
    def status(self) -> str:
        """In one word: ``loading``, ``ready``, ``failed`` or ``stopping``."""
        if self.is_stopping:
            return "stopping"
        states = {pipeline.state for pipeline in self.pipelines.values()}
        if any(pipeline.lost_stages for pipeline in self.pipelines.values()):
            return PipelineState.FAILED.value
        for state in (PipelineState.FAILED, PipelineState.LOADING):
            if state in states:
                return state.value
        return PipelineState.READY.value

    def find(self, name: str) -> ServedPipeline:
        """A pipeline by its name.

        Raises:
            ApiError: with status 404: there is none; with 503: the server stops.
        """
        if self.is_stopping:
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE, "the server is stopping", code="stopping"
            )
        pipeline = self.pipelines.get(name)
        if pipeline is None:
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"the model {name!r:.80} does not exist{suggest(name[:80], self.pipelines)}",
                param="model",
                code="model_not_found",
            )
        return pipeline

    @contextmanager
    def session(self) -> Generator[None]:
        """Count a realtime session for as long as the ``with`` block lasts.

        Raises:
            ApiError: with status 429: there are as many as may be.
        """
        most = self.settings.limits.max_sessions
        if self.num_sessions >= most:
            raise ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{most} realtime sessions are open, as many as this server takes; try again later",
                code="too_many_sessions",
            )
        self.num_sessions += 1
        try:
            yield
        finally:
            self.num_sessions -= 1

    def check_room(self, client: Client) -> None:
        """Check that a request would be taken now, before anything of it is read.

        With several pipelines it has to be read for which one it is; that is checked later.

        Args:
            client: who asks.

        Raises:
            ApiError: with status 429: too many wait; with 503: a stage has no worker.
        """
        if len(self.pipelines) == 1:
            for pipeline in self.pipelines.values():
                pipeline.check_room(client)

    def start_loading(self) -> None:
        """Load the pipelines in a thread of their own."""
        self._loader.start()

    @property
    def is_loading(self) -> bool:
        """Whether that thread still works, even on pipelines that were closed meanwhile."""
        return self._loader.is_alive()

    async def close(self) -> None:
        """End what runs, and close all pipelines; those that are still loaded are closed later."""
        self.is_stopping = True
        await asyncio.to_thread(self._close)

    def _load(self) -> None:
        for pipeline in self.pipelines.values():
            if self.is_stopping:
                return
            try:
                pipeline.load()
            except Exception as error:  # the pipeline's state tells of it, and serve() raises it
                _logger.debug("pipeline %r cannot be loaded", pipeline.name, exc_info=True)
                self.failure = error
                self.on_failure()
                return
            _logger.info("pipeline %r is ready", pipeline.name)
        self.on_loaded()

    def _close(self) -> None:
        for pipeline in self.pipelines.values():
            try:
                pipeline.close()
            except Exception:  # the others are closed all the same
                _logger.exception("pipeline %r could not be closed", pipeline.name)
        self.fetcher.close()
        if self.meters.spans is not None:
            self.meters.spans.close()
