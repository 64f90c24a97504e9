"""Counts and times what a server does, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from omni.requests.request import OmniOutput
    from omni.server.serving.admission import Admission
    from stages import StageStats
    from stages.worker.worker_state import WorkerState

__all__ = ["Metered", "Meters", "RequestMeter"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_FACTORS = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0)

_COUNTERS = (
    ("steps", "num_steps", "Steps that a stage has run."),
    ("busy_seconds", "busy_s", "Seconds that a stage has spent in steps."),
    ("prompt_tokens", "prompt_tokens", "Tokens of inputs that began to run."),
    ("cached_tokens", "cached_tokens", "Tokens of these that the cache saved computing."),
    ("generated_tokens", "generated_tokens", "Tokens that were sampled."),
    ("encoder_runs", "encoder_runs", "Images, sounds and the like that were encoded."),
    ("encoder_hits", "encoder_hits", "Those that were needed and were there."),
    ("preemptions", "num_preemptions", "Times that a request had to give its blocks back."),
)


class Metered(Protocol):
    """A pipeline, as far as it is read here."""

    @property
    def name(self) -> str:
        """The model's."""

    @property
    def admission(self) -> Admission:
        """Whose turn it is."""

    def stats(self) -> Mapping[str, StageStats]:
        """Every stage's counters."""

    def worker_states(self) -> Mapping[str, tuple[WorkerState, ...]]:
        """How the workers of stages that run elsewhere are doing."""


class Meters:
    """What one server tells of itself; all names begin with ``omni_``.

    Args:
        pipelines: whose stages are read when somebody looks.
    """

    def __init__(self, pipelines: Iterable[Metered]) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "omni_requests",
            "Requests that have ended, by how: ok, refused, rejected (too many), failed, aborted.",
            ["model", "status"],
            registry=self._registry,
        )
        self.queue = self._seconds("queue", "Waiting for a turn.")
        self.first_token = self._seconds("time_to_first_token", "Until the first text or token.")
        self.first_audio = self._seconds("time_to_first_audio", "Until the first sound.")
        self.total = self._seconds("request_duration", "From arrival to the end, of whole answers.")
        self.real_time = Histogram(
            "omni_real_time_factor",
            "Seconds that a second of sound took.",
            ["model"],
            buckets=_FACTORS,
            registry=self._registry,
        )
        self._registry.register(_Stages(tuple(pipelines)))

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)

    def _seconds(self, name: str, what: str) -> Histogram:
        return Histogram(
            f"omni_{name}_seconds", what, ["model"], buckets=_SECONDS, registry=self._registry
        )


class RequestMeter:
    """Times one request.

    Args:
        meters: of the server.
        model: the pipeline's name.
    """

    def __init__(self, meters: Meters, model: str) -> None:
        self._meters = meters
        self._model = model
        self._arrived = time.monotonic()
        self._has_token = False
        self._has_audio = False
        self._is_over = False

    def begin(self) -> None:
        """It is the request's turn."""
        self._meters.queue.labels(self._model).observe(self._elapsed)

    def note(self, output: OmniOutput) -> None:
        """Something came of it."""
        for stage in output.stages.values():
            if not self._has_token and stage.token_ids:
                self._has_token = True
                self._meters.first_token.labels(self._model).observe(self._elapsed)
            if not self._has_audio and stage.audio_delta is not None:
                self._has_audio = True
                self._meters.first_audio.labels(self._model).observe(self._elapsed)
        if output.finished and output.error is None:
            for stage in output.stages.values():
                if stage.audio is not None and stage.audio.duration_s:
                    factor = self._elapsed / stage.audio.duration_s
                    self._meters.real_time.labels(self._model).observe(factor)
            self.end("ok")
        elif output.finished:
            self.end("refused" if output.refused else "failed")

    def end(self, status: str) -> None:
        """It has ended; only the first word on it counts."""
        if not self._is_over:
            self._is_over = True
            self._meters.requests.labels(self._model, status).inc()
            if status == "ok":
                self._meters.total.labels(self._model).observe(self._elapsed)

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._arrived


class _Stages(Collector):
    """Reads the stages' own counters."""

    def __init__(self, pipelines: tuple[Metered, ...]) -> None:
        self._pipelines = pipelines

    def collect(self) -> Iterator[Metric]:
        for name, what in (("running", "have had their turn"), ("waiting", "wait for it")):
            gauge = GaugeMetricFamily(
                f"omni_requests_{name}", f"Requests that {what}.", None, ["model"]
            )
            for pipeline in self._pipelines:
                gauge.add_metric([pipeline.name], getattr(pipeline.admission, f"num_{name}"))
            yield gauge
        stats = [
            (pipeline.name, stage, reading)
            for pipeline in self._pipelines
            for stage, reading in pipeline.stats().items()
        ]
        for name, field, what in _COUNTERS:
            counter = CounterMetricFamily(f"omni_stage_{name}", what, None, ["model", "stage"])
            for model, stage, reading in stats:
                counter.add_metric([model, stage], getattr(reading, field))
            yield counter
        yield from _memory(stats)
        yield from self._workers()

    def _workers(self) -> Iterator[Metric]:
        labels = ["model", "stage", "replica"]
        up = GaugeMetricFamily(
            "omni_stage_worker_up", "Whether a worker takes requests.", None, labels
        )
        restarts = CounterMetricFamily(
            "omni_stage_restarts",
            "Workers started in the place of one that had ended.",
            None,
            labels,
        )
        for pipeline in self._pipelines:
            for stage, workers in pipeline.worker_states().items():
                for replica, worker in enumerate(workers):
                    up.add_metric([pipeline.name, stage, str(replica)], worker.state == "up")
                    restarts.add_metric([pipeline.name, stage, str(replica)], worker.num_restarts)
        yield up
        yield restarts


def _memory(stats: list[tuple[str, str, StageStats]]) -> Iterator[Metric]:
    blocks = GaugeMetricFamily(
        "omni_stage_blocks", "Large pages by state: free, held, cached.", None,
        ["model", "stage", "state"],
    )  # fmt: skip
    rate = GaugeMetricFamily(
        "omni_stage_hit_rate",
        "Cached tokens of all tokens of inputs, since the start.",
        None,
        ["model", "stage"],
    )
    towers = GaugeMetricFamily(
        "omni_stage_encoder_cache_bytes", "Bytes of encoded items.", None, ["model", "stage"]
    )
    for model, stage, reading in stats:
        if reading.prompt_tokens:
            rate.add_metric([model, stage], reading.cached_tokens / reading.prompt_tokens)
        if reading.kv is not None:
            for state in ("free", "held", "cached"):
                blocks.add_metric([model, stage, state], getattr(reading.kv, state))
        if reading.encoder_cache is not None:
            towers.add_metric([model, stage], reading.encoder_cache.nbytes)
    yield blocks
    yield rate
    yield towers
