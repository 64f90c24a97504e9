"""Pipelines of a server: loaded sequentially, looked up by name, closed together."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from engine.interface.log_fields import package_logger
from engine.interface.placed_error import suggest
from omni.pipelines.pipeline_config import PipelineConfig
from omni.server.serving.admission_queue import AdmissionQueue
from omni.server.serving.api_error import ApiError
from omni.server.serving.client import Client
from omni.server.serving.meters import Meters, RequestMeter, spans_from_environment
from omni.server.serving.response_store import ResponseStore
from omni.server.serving.settings import ServerLimits, ServerSettings
from omni.server.serving.url_fetcher import UrlFetcher
from stages import Stage, StageStats
from stages.worker.stage_link import WorkerState, why_lost

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from omni.runtime.driver import Driver
    from omni.runtime.omni import Omni


_logger = package_logger(__name__)

_RETRY_WHILE_LOADING_S = 5
_RETRY_WHILE_WAITING_S = 5
"""Matches the interval at which a worker that waits for a slot is retried."""


class PipelineState(StrEnum):
    """Lifecycle state of a pipeline."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


class ServedPipeline:
    """One pipeline of a server; its name is the model name for clients.

    ``state`` may be read from any thread, and ``error`` is the reason for a failure. ``created`` is
    the time of construction, in seconds since 1970. ``tokenizers`` are those of the stages' texts,
    once it is loaded; None for a stage without text or tokenizer.
    """

    def __init__(
        self, config: PipelineConfig, limits: ServerLimits, meters: Meters, *, apart: bool = False
    ) -> None:
        self.config = config
        self._apart = apart
        self.name: str = config.name
        self.created = int(time.time())
        running = limits.running_requests(config.stages.values())
        self.queue = AdmissionQueue(running, limits.max_waiting_requests)
        self.state = PipelineState.LOADING
        self.error: str | None = None
        self.meters = meters
        self._omni: Omni | None = None
        self.tokenizers: Mapping[str, PreTrainedTokenizerBase | None] = {}
        self._lock = threading.Lock()

    def load(self) -> None:
        """Build the stages and load their models; close them if stopped meanwhile. Slow."""
        # Imported lazily: the server must respond before torch is imported.
        from omni.runtime.omni import Omni

        try:
            omni = Omni(self.config, apart=self._apart)
            with ExitStack() as unless_ready:
                unless_ready.callback(omni.close)
                self.tokenizers = {
                    name: _tokenizer_of(self.config, name, stage)
                    for name, stage in omni.pipeline.stages.items()
                }
                unless_ready.pop_all()
        except Exception as error:  # reported to clients by the state
            self.fail(str(error) if isinstance(error, ValueError) else repr(error))
            raise
        with self._lock:
            if self.state is PipelineState.LOADING:
                self._omni, self.state = omni, PipelineState.READY
                return
        omni.close()

    def fail(self, error: str) -> None:
        """Mark the pipeline as failed, so that it accepts no more requests."""
        with self._lock:
            if self.state is not PipelineState.STOPPED:
                self.state, self.error = PipelineState.FAILED, error

    def close(self) -> None:
        """Abort running requests with an error, and close the stages. Idempotent."""
        with self._lock:
            omni, self._omni, self.state = self._omni, None, PipelineState.STOPPED
        if omni is not None:
            omni.close()

    def stats(self) -> Mapping[str, StageStats]:
        """Return every stage's counters; empty while the pipeline is not loaded."""
        omni = self._omni
        return {} if omni is None else omni.stats()

    def describe(self) -> dict[str, Any]:
        """Describe the model for clients; null values are not known until it is loaded."""
        omni, stages = self._omni, self.config.stages
        made = [kind for stage in stages.values() for kind in stage.final_output]
        described: dict[str, Any] = {
            "stages": [{"name": name, "kind": stage.kind} for name, stage in stages.items()],
            "modalities": {"input": None, "output": list(dict.fromkeys(made))},
            "examples": self.config.examples,
            "voices": None,
            "max_model_len": None,
        }
        if omni is None:
            return described
        # A prompt goes to every stage without inputs from other stages.
        readers = [each.describe() for each in omni.pipeline.stages.values() if each.inputs is None]
        lengths = [each["max_model_len"] for each in readers if "max_model_len" in each]
        read = [kind for each in readers for kind in each.get("input_modalities", ())]
        described["modalities"]["input"] = list(dict.fromkeys(read))
        described["voices"] = list(omni.pipeline.voices.own)
        described["max_model_len"] = min(lengths, default=None)
        return described

    def worker_states(self) -> Mapping[str, tuple[WorkerState, ...]]:
        """Return the state of the workers of remote stages, without waiting for them."""
        omni = self._omni
        return {} if omni is None else omni.worker_states()

    @property
    def lost_stages(self) -> Mapping[str, str]:
        """Stages without a worker that accepts requests now, each with the reason."""
        return _lost_stages(self.worker_states())

    def check_stages(self) -> None:
        """Check that every stage has a worker or gets one: a request passes through all stages.

        Raises:
            ApiError: with status 503 if a stage has none; with ``Retry-After`` if its workers wait
                for a slot in the cluster, and continue once they get one.
        """
        states = self.worker_states()
        lost = _lost_stages(states)
        if not lost:
            return
        is_waiting = all(any(each.state == "waiting" for each in states[name]) for name in lost)
        message = "; ".join(f"stage {name!r}: {why}" for name, why in lost.items())
        if is_waiting:
            raise ApiError.unavailable(message, "stage_waiting", _RETRY_WHILE_WAITING_S)
        raise ApiError.unavailable(message, "stage_down")

    def replica_stats(self) -> Mapping[str, Sequence[StageStats]]:
        """Return every stage's counters, by replica."""
        omni = self._omni
        return {} if omni is None else omni.replica_stats()

    def check_room(self, client: Client) -> None:
        """Refuse a request early if the queue is full or a stage has no worker."""
        try:
            self.check_stages()
            self.queue.check_room()
        except ApiError as error:
            is_full = error.status is HTTPStatus.TOO_MANY_REQUESTS
            RequestMeter(self.meters, self.name, client).end("rejected" if is_full else "failed")
            error.is_recorded = True
            raise

    @property
    def driver(self) -> Driver:
        """The thread that drives the running pipeline and emits deltas; 503 as for `omni`."""
        return self.omni._driver  # private to users: the format of a delta may change

    @property
    def omni(self) -> Omni:
        """The running pipeline; raises an error with status 503 while there is none."""
        omni = self._omni
        if omni is not None and self.state is PipelineState.READY:
            return omni
        if self.state is PipelineState.LOADING:
            message = f"the model {self.name!r} is loading; /health tells when it is ready"
            raise ApiError.unavailable(message, "model_loading", _RETRY_WHILE_LOADING_S)
        why = f": {self.error}" if self.error else ""
        message = f"the model {self.name!r} is {self.state}{why}"
        raise ApiError.unavailable(message, f"model_{self.state}")


def _lost_stages(states: Mapping[str, Sequence[WorkerState]]) -> dict[str, str]:
    reasons = {name: why_lost(workers) for name, workers in states.items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _tokenizer_of(
    config: PipelineConfig, name: str, stage: Stage
) -> PreTrainedTokenizerBase | None:
    """Return a stage's own tokenizer; load that of a remote stage in this process."""
    from stages.remote.remote_stage import RemoteStage

    if not isinstance(stage, RemoteStage):
        return stage.tokenizer
    reads_text = stage.inputs is None or "text" in stage.final_output
    return config.resolved(name).load_tokenizer() if reads_text else None


class PipelineServer:
    """All pipelines of a server.

    Args:
        apart: if true, each pipeline with inline stages runs them in a separate process, so that
            serving and computing do not compete for one interpreter lock.

    Attributes:
        num_sessions: number of open realtime sessions.
        is_stopping: true if no more requests are accepted.
        failure: the error that kept a pipeline from loading. The loading thread then calls
            ``on_failure``; it calls ``on_loaded`` when all pipelines are ready.
    """

    def __init__(
        self, configs: Sequence[PipelineConfig], settings: ServerSettings, *, apart: bool = False
    ) -> None:
        if not configs:
            raise ValueError("a server needs at least one pipeline")
        self.settings = settings
        self.pipelines: dict[str, ServedPipeline] = {}
        self.meters = Meters(self.pipelines.values())  # a view of the dict filled below
        self.meters.spans = spans_from_environment()
        for config in configs:
            if config.name in self.pipelines:
                raise ValueError(
                    f"two pipelines are named {config.name!r}; clients choose by name, so change "
                    "one with the key 'name' of its YAML file"
                )
            self.pipelines[config.name] = ServedPipeline(
                config, settings.limits, self.meters, apart=apart
            )
        self.names = dict(self.pipelines)
        for alias, name in settings.aliases.items():
            if alias in self.names:
                raise ValueError(f"the alias {alias!r} is the name of a pipeline that is served")
            self.names[alias] = self._find_served("pipeline of an alias", name)
        if settings.transcriber is not None:
            self._find_served("transcriber", settings.transcriber)
        self.fetcher = UrlFetcher(settings.allow_url_hosts, settings.limits)
        self.responses = ResponseStore()
        self.spoken = ResponseStore(kind="audio")
        self.num_sessions = 0
        self.is_stopping = False
        self.failure: Exception | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.on_loaded: Callable[[], None] = lambda: None
        self._loader = threading.Thread(target=self._load, name="omni-loader", daemon=True)

    def _find_served(self, what: str, name: str) -> ServedPipeline:
        if name not in self.pipelines:
            raise ValueError(
                f"the {what} {name!r} is none of the pipelines that are served"
                f"{suggest(name, self.pipelines)}"
            )
        return self.pipelines[name]

    @property
    def status(self) -> str:
        """``loading``, ``ready``, ``failed`` or ``stopping``."""
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
        """Return a pipeline by name or alias; an error has status 404, or 503 while stopping."""
        if self.is_stopping:
            raise ApiError.unavailable("the server is stopping", "stopping")
        pipeline = self.names.get(name)
        if pipeline is None:
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"the model {name!r:.80} does not exist{suggest(name[:80], self.names)}",
                param="model",
                code="model_not_found",
            )
        return pipeline

    @contextmanager
    def session(self) -> Generator[None]:
        """Count a realtime session during the ``with`` block; refuse with 429 above the limit."""
        most = self.settings.limits.max_sessions
        if self.num_sessions >= most:
            raise ApiError.too_many(
                f"{most} realtime sessions are open, as many as this server takes; try again later",
                "too_many_sessions",
            )
        self.num_sessions += 1
        try:
            yield
        finally:
            self.num_sessions -= 1

    def check_room(self, client: Client, model: str | None = None) -> None:
        """Raise an error if a request would not be accepted now.

        With one pipeline, this is checked before the request is read; with several, once its
        ``model`` is known.
        """
        if (model is None) == (len(self.pipelines) == 1):
            self.names[model or next(iter(self.names))].check_room(client)

    def start_loading(self) -> None:
        """Load the pipelines in a separate thread."""
        self._loader.start()

    @property
    def is_loading(self) -> bool:
        """True while the loading thread runs, even if its pipelines were closed meanwhile."""
        return self._loader.is_alive()

    async def close(self) -> None:
        """Abort requests and close all pipelines; one still loading is closed once it is loaded."""
        self.is_stopping = True
        await asyncio.to_thread(self._close)

    def _load(self) -> None:
        for pipeline in self.pipelines.values():
            if self.is_stopping:
                return
            try:
                pipeline.load()
            except Exception as error:  # reported by its state, and raised by serve()
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
            except Exception:  # close the others nevertheless
                _logger.exception("pipeline %r could not be closed", pipeline.name)
        self.fetcher.close()
        if self.meters.spans is not None:
            self.meters.spans.close()
