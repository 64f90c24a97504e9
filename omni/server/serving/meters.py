"""Metrics, timings and request records of a server: for Prometheus, its page and OpenTelemetry.

When a request ends, a span is created for it, with a child span for each of its stages.
OpenTelemetry is imported only if spans are requested: by its standard environment variables, or by
a program around the server that has set a tracer provider.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.interface.log_fields import package_logger
from omni.requests.request import OmniDelta, StageTime
from omni.server.serving.admission_queue import AdmissionQueue
from omni.server.serving.client import Client
from stages import StageStats
from stages.worker.stage_link import WorkerState

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

_logger = package_logger(__name__)

_MAX_RECENT = 200
_MAX_RECENT_REJECTED = 50
_REJECTED = "rejected"


@dataclass(slots=True)
class RequestRecord:
    """Timings and outcome of one request, without its prompt and output.

    Times are ``time.monotonic`` of this process, or None for events that did not occur; only
    ``arrived_s`` is in seconds since 1970. ``turn_s`` is when it was submitted to the pipeline.

    Attributes:
        tenant: see :class:`~omni.server.serving.client.Client`.
        status: ok, refused, rejected, failed or aborted.
        traceparent: header of W3C Trace Context; not validated.
    """

    model: str
    request_id: str
    tenant: str | None
    arrived_s: float
    began_s: float
    turn_s: float | None = None
    first_token_s: float | None = None
    first_audio_s: float | None = None
    ended_s: float = 0.0
    status: str = ""
    traceparent: str | None = None
    stages: dict[str, StageTime] = field(default_factory=dict)

    def to_object(self) -> dict[str, Any]:
        """Return the record as a JSON object, with times in seconds since arrival."""
        return {
            "request_id": self.request_id,
            "status": self.status,
            "arrived": round(self.arrived_s, 3),
            "seconds": self._since(self.ended_s),
            "turn": self._since(self.turn_s),
            "first_token": self._since(self.first_token_s),
            "first_audio": self._since(self.first_audio_s),
            "stages": [self._stage(each) for each in self.stages.values()],
        }

    def _stage(self, time: StageTime) -> dict[str, Any]:
        return {
            "name": time.stage,
            "entered": self._since(time.entered_s),
            # A stage from which the request was removed was left when the request ended.
            "left": self._since(self.ended_s if time.ended_s is None else time.ended_s),
            "is_whole": time.ended_s is not None,
            "queue": time.queue_s,
            "first_token": time.first_token_s,
            "prompt_tokens": time.num_prompt_tokens,
            "cached_tokens": time.num_cached_tokens,
            "tokens": time.num_tokens,
            "preemptions": time.num_preemptions,
            "prefix_miss": time.prefix_miss,
        }

    def _since(self, time_s: float | None) -> float | None:
        return None if time_s is None else round(time_s - self.began_s, 6)


class RecentRequests:
    """The most recent requests of all pipelines.

    Rejected requests have a separate buffer: they can arrive by the hundreds per second, and would
    displace all others.
    """

    def __init__(self) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=_MAX_RECENT)
        self._rejected: deque[RequestRecord] = deque(maxlen=_MAX_RECENT_REJECTED)

    def add(self, record: RequestRecord) -> None:
        """Add a finished request."""
        (self._rejected if record.status == _REJECTED else self._records).append(record)

    def of(self, model: str, tenant: str | None) -> Iterator[RequestRecord]:
        """Yield the requests of a pipeline and a tenant, the most recently ended first."""
        kept = [*self._records, *self._rejected]
        for record in sorted(kept, key=lambda each: each.ended_s, reverse=True):
            if record.model == model and record.tenant == tenant:
                yield record


_NAME = "omni-pipeline"
_EXPORTERS = "opentelemetry_traces_exporter"
"""Entry point group in which OpenTelemetry finds exporters, such as console and otlp."""
_OTLP = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class RequestSpans:
    """Creates spans of finished requests; ``close`` flushes pending spans."""

    def __init__(self, tracer: Tracer, close: Callable[[], object] = lambda: None) -> None:
        self._tracer = tracer
        self.close = close

    def add(self, record: RequestRecord) -> None:
        """Create the spans of a request, in the trace named by its client, if any."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        attributes: dict[str, str | int] = {
            "omni.model": record.model,
            "omni.request_id": record.request_id,
            "omni.status": record.status,
        }
        span = self._start(
            f"request {record.model}",
            record.traceparent,
            attributes,
            _nanos(record, record.began_s),
        )
        moments = {
            "turn": record.turn_s,
            "first token": record.first_token_s,
            "first audio": record.first_audio_s,
        }
        for name, time_s in moments.items():
            if time_s is not None:
                span.add_event(name, timestamp=_nanos(record, time_s))
        if record.status == "failed":
            span.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(span)
        for spent in record.stages.values():
            stage = self._tracer.start_span(
                f"stage {spent.stage}",
                inside,
                attributes={
                    "omni.model": record.model,
                    "omni.stage": spent.stage,
                    "omni.prompt_tokens": spent.num_prompt_tokens,
                    "omni.cached_tokens": spent.num_cached_tokens,
                    "omni.generated_tokens": spent.num_tokens,
                    "omni.preemptions": spent.num_preemptions,
                    "omni.is_whole": spent.ended_s is not None,
                },
                start_time=_nanos(record, spent.entered_s),
            )
            after = {"first step": spent.queue_s, "first token": spent.first_token_s}
            for name, after_s in after.items():
                if after_s is not None:
                    stage.add_event(name, timestamp=_nanos(record, spent.entered_s + after_s))
            left_s = record.ended_s if spent.ended_s is None else spent.ended_s
            stage.end(_nanos(record, left_s))
        span.end(_nanos(record, record.ended_s))

    def add_refused(
        self, name: str, traceparent: str | None, attributes: Mapping[str, str | int], took_s: float
    ) -> None:
        """Create the span of a request refused just now, before it reached a pipeline."""
        end = time.time_ns()
        start = end - round(took_s * 1e9)
        self._start(name, traceparent, {"omni.status": "refused", **attributes}, start).end(end)

    def _start(
        self, name: str, traceparent: str | None, attributes: Mapping[str, str | int], start: int
    ) -> Span:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {} if traceparent is None else {"traceparent": traceparent}
        context = TraceContextTextMapPropagator().extract(carrier)
        return self._tracer.start_span(name, context, SpanKind.SERVER, attributes, start_time=start)


def spans_from_environment(environment: Mapping[str, str] = os.environ) -> RequestSpans | None:
    """Configure spans by environment variables; return None if none are requested.

    A provider set by the surrounding program, such as ``opentelemetry-instrument``, takes
    precedence. Otherwise ``OTEL_TRACES_EXPORTER`` names exporters (``otlp``, ``console``, ...), or
    an OTLP endpoint is set; OpenTelemetry reads all its other variables itself. A missing package
    is only a warning: a server works without tracing.
    """
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if "opentelemetry.sdk.trace" in sys.modules:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider

        found = trace.get_tracer_provider()
        if isinstance(found, TracerProvider):
            return RequestSpans(found.get_tracer(_NAME))
    wanted = environment.get("OTEL_TRACES_EXPORTER", "")
    if not wanted and any(environment.get(name) for name in _ENDPOINTS):
        wanted = "otlp"
    names = [name.strip() for name in wanted.split(",") if name.strip() not in ("", "none")]
    provider = _provider(names, environment) if names else None
    return None if provider is None else RequestSpans(provider.get_tracer(_NAME), provider.shutdown)


def _provider(names: list[str], environment: Mapping[str, str]) -> TracerProvider | None:
    try:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        _logger.warning(
            "spans are wanted, but not made: pip install -e '.[otel]' in omni-pipeline's checkout"
        )
        return None
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: _NAME}))
    # The server shuts it down itself; no atexit handler is needed.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    known = {each.name: each for each in entry_points(group=_EXPORTERS)}
    for wanted in names:
        name = _resolve_otlp(known, environment) if wanted == "otlp" else wanted
        if name not in known:
            _logger.warning(
                "no spans are sent to %r: installed are the exporters %s; for otlp, "
                "pip install opentelemetry-exporter-otlp",
                name,
                ", ".join(sorted(known)) or "none",
            )
            continue
        provider.add_span_processor(BatchSpanProcessor(known[name].load()()))
    return provider


def _resolve_otlp(known: Collection[str], environment: Mapping[str, str]) -> str:
    """Resolve ``otlp`` to the exporter of the requested protocol, else to an installed one."""
    wanted = next((environment[name] for name in _PROTOCOLS if environment.get(name)), None)
    if wanted is not None:
        return _OTLP.get(wanted, f"otlp by {wanted}")
    return next((name for name in _OTLP.values() if name in known), "otlp")


def _nanos(record: RequestRecord, time_s: float) -> int:
    """Convert a monotonic time to nanoseconds since 1970."""
    return round((record.arrived_s + (time_s - record.began_s)) * 1e9)


_STAGE = ("model", "stage", "replica")

_COUNTERS = (
    ("steps", "num_steps", "Steps that a stage has run."),
    ("busy_seconds", "busy_s", "Seconds that a stage has spent in steps."),
    ("prompt_tokens", "prompt_tokens", "Tokens of inputs that began to run."),
    ("cached_tokens", "cached_tokens", "Tokens of these that the cache saved computing."),
    ("generated_tokens", "generated_tokens", "Tokens that were sampled."),
    ("encoder_runs", "encoder_runs", "Inputs that towers or encoders encoded."),
    ("encoder_hits", "encoder_hits", "Such inputs that were needed and whose rows were there."),
    ("preemptions", "num_preemptions", "Times that a request had to give its blocks back."),
    (
        "restarts",
        "num_restarts",
        "Times that a worker was started again, or an engine built again.",
    ),
    ("transfers", "num_transfers", "Outputs and chunks that other stages handed over."),
    ("transferred_bytes", "transferred_bytes", "Bytes of the tensors in these."),
)
_GROUP = ("group", "kind")
_SAMPLED: Mapping[str, tuple[type[CounterMetricFamily | GaugeMetricFamily], str, Sequence[str]]] = {
    "evictions": (
        CounterMetricFamily,
        "Cached blocks of each group of layers that were given up for others.",
        _GROUP,
    ),
    "prefix_misses": (
        CounterMetricFamily,
        "Requests whose prefix was not hit further, by the reason.",
        ("reason",),
    ),
    "group_misses": (
        CounterMetricFamily,
        "Prefixes that ended as a group of layers lacked what it needs to go on.",
        _GROUP,
    ),
    "offload_hit_tokens": (CounterMetricFamily, "Tokens that came back from tiers.", ("tier",)),
    "offload_blocks": (
        CounterMetricFamily,
        "Blocks handed to the tiers below the pool, and what became of others.",
        ("event",),
    ),
    "running": (GaugeMetricFamily, "Requests in steps.", ()),
    "waiting": (GaugeMetricFamily, "Requests that wait for a step.", ()),
    "blocks": (GaugeMetricFamily, "Large pages by state.", ("state",)),
    "group_blocks": (
        GaugeMetricFamily,
        "Blocks of each group of layers by state.",
        (*_GROUP, "state"),
    ),
    "cache_bytes": (GaugeMetricFamily, "Bytes of each cache.", ("cache",)),
    "hit_rate": (GaugeMetricFamily, "Cached tokens of all tokens of inputs, since the start.", ()),
}
"""Metrics yielded by :func:`_samples`, with their labels in addition to the stage's."""


def _samples(stats: StageStats) -> Iterator[tuple[str, tuple[str, ...], float]]:
    yield "running", (), stats.num_running
    yield "waiting", (), stats.num_waiting
    if stats.prompt_tokens:
        yield "hit_rate", (), stats.cached_tokens / stats.prompt_tokens
    if (kv := stats.kv) is not None:
        for index, group in enumerate(kv.groups):
            labels = (str(index), group.kind)
            yield "evictions", labels, group.evictions
            yield "group_misses", labels, group.misses
            for state in ("held", "cached"):
                yield "group_blocks", (*labels, state), getattr(group, state)
        for reason, count in sorted(kv.misses.items()):
            yield "prefix_misses", (reason,), count
        for state in ("free", "held", "cached"):
            yield "blocks", (state,), getattr(kv, state)
        yield "cache_bytes", ("kv",), kv.nbytes
        yield "cache_bytes", ("stage_outputs",), kv.output_bytes
        if (items := kv.items) is not None:
            yield "cache_bytes", ("encoder",), (items.held + items.cached) * items.block_bytes
        for tier in ("host", "disk"):
            yield "offload_hit_tokens", (tier,), getattr(stats.offload, f"{tier}_hit_tokens", 0)
        for event in ("stored", "dropped", "damaged", "errors"):
            yield "offload_blocks", (event,), getattr(stats.offload, event, 0)
    if stats.offload is not None:
        for tier in ("host", "disk"):
            yield "cache_bytes", (tier,), getattr(stats.offload, f"{tier}_bytes")


class Metered(Protocol):
    """Interface of a served pipeline for metrics."""

    name: str
    queue: AdmissionQueue

    def replica_stats(self) -> Mapping[str, Sequence[StageStats]]:
        """Return every stage's counters, by replica."""

    def worker_states(self) -> Mapping[str, Sequence[WorkerState]]:
        """Return the state of the workers of remote stages."""


_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_FACTORS = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0)


class Meters(Collector):
    """All metrics of one server; their names begin with ``omni_``.

    Combines the server's own counters with the stages' counters, which are read on collection.
    ``recent`` has the most recent requests; ``spans``, if exported, creates spans of each.
    """

    def __init__(self, pipelines: Collection[Metered]) -> None:
        self._pipelines = pipelines
        self.recent = RecentRequests()
        self.spans: RequestSpans | None = None
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "omni_requests",
            "Requests that have ended, by how: ok, refused, rejected (too many), failed, aborted.",
            ["model", "status"],
            registry=self._registry,
        )
        self.queue = self._histogram("queue_seconds", "Waiting for a turn.")
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Until the first text or token."
        )
        self.first_audio = self._histogram("time_to_first_audio_seconds", "Until the first sound.")
        self.between_tokens = self._histogram(
            "time_between_tokens_seconds",
            "From one token to the next, of stages whose text or tensors the user gets.",
            _GAPS,
            ("model", "stage"),
        )
        self.total = self._histogram(
            "request_duration_seconds", "From arrival to the end, of whole answers."
        )
        self.real_time = self._histogram(
            "real_time_factor", "Seconds that a second of sound took.", _FACTORS
        )
        self._registry.register(self)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the stages' metrics; see :class:`prometheus_client.registry.Collector`."""
        for name, what in (("running", "have had their turn"), ("waiting", "wait for it")):
            gauge = GaugeMetricFamily(
                f"omni_requests_{name}", f"Requests that {what}.", None, ["model"]
            )
            for pipeline in self._pipelines:
                gauge.add_metric([pipeline.name], getattr(pipeline.queue, f"num_{name}"))
            yield gauge
        readings = [
            ((pipeline.name, stage, str(replica)), stats)
            for pipeline in self._pipelines
            for stage, replicas in pipeline.replica_stats().items()
            for replica, stats in enumerate(replicas)
        ]
        for name, counted, what in _COUNTERS:
            counter = CounterMetricFamily(f"omni_stage_{name}", what, None, _STAGE)
            for replica_labels, stats in readings:
                counter.add_metric(replica_labels, getattr(stats, counted))
            yield counter
        families = {
            name: family(f"omni_stage_{name}", what, None, (*_STAGE, *labels))
            for name, (family, what, labels) in _SAMPLED.items()
        }
        for replica_labels, stats in readings:
            for name, more, value in _samples(stats):
                families[name].add_metric((*replica_labels, *more), value)
        yield from families.values()
        up = GaugeMetricFamily(
            "omni_stage_worker_up", "Whether a worker takes requests.", None, _STAGE
        )
        for pipeline in self._pipelines:
            for stage, workers in pipeline.worker_states().items():
                for replica, worker in enumerate(workers):
                    up.add_metric([pipeline.name, stage, str(replica)], worker.state == "up")
        yield up

    def _histogram(
        self,
        name: str,
        what: str,
        buckets: Sequence[float] = _SECONDS,
        labels: Sequence[str] = ("model",),
    ) -> Histogram:
        return Histogram(f"omni_{name}", what, labels, buckets=buckets, registry=self._registry)


class RequestMeter:
    """Times one request; ``request_id`` is None for a request whose body was not read."""

    def __init__(
        self, meters: Meters, model: str, client: Client, request_id: str | None = None
    ) -> None:
        self._meters = meters
        self._model = model
        self._record = RequestRecord(
            model, request_id or client.request_id, client.tenant, time.time(), time.monotonic()
        )
        self._record.traceparent = client.traceparent
        self._tokens: dict[str, tuple[Histogram, float]] = {}  # with the time of the last tokens
        self._audio_s: dict[str, float] = {}

    def begin(self) -> None:
        """Record that the request was admitted."""
        self._record.turn_s = time.monotonic()
        self._meters.queue.labels(self._model).observe(self._elapsed)

    def record_delta(self, delta: OmniDelta) -> None:
        """Record new output."""
        record = self._record
        for each in delta.timeline:
            record.stages[each.stage] = each
        num_tokens: dict[str, int] = {}
        for name, new in delta.deltas:
            if new.token_ids:
                num_tokens[name] = num_tokens.get(name, 0) + len(new.token_ids)
            if new.audio is not None:
                if record.first_audio_s is None:
                    record.first_audio_s = time.monotonic()
                    self._meters.first_audio.labels(self._model).observe(self._elapsed)
                self._audio_s[name] = self._audio_s.get(name, 0.0) + new.audio.duration_s
            if new.whole_audio is not None:
                self._audio_s[name] = new.whole_audio.duration_s
        for name, number in num_tokens.items():
            self._record_tokens(name, number)
        if not delta.finished:
            return
        if delta.error is None:
            for duration_s in filter(None, self._audio_s.values()):
                factor = self._elapsed / duration_s
                self._meters.real_time.labels(self._model).observe(factor)
            self.end("ok")
        else:
            self.end("refused" if delta.refused else "failed")

    def end(self, status: str) -> None:
        """Record the end of the request; only the first call counts."""
        record = self._record
        if not record.status:
            record.status, record.ended_s = status, time.monotonic()
            self._meters.requests.labels(self._model, status).inc()
            self._meters.recent.add(record)
            if self._meters.spans is not None:
                self._meters.spans.add(record)
            if status == "ok":
                self._meters.total.labels(self._model).observe(self._elapsed)

    def _record_tokens(self, stage: str, number: int) -> None:
        """Time new tokens; tokens of one delta share the elapsed time equally."""
        now = time.monotonic()
        if stage not in self._tokens:
            self._tokens[stage] = self._meters.between_tokens.labels(self._model, stage), now
            if self._record.first_token_s is None:
                self._record.first_token_s = now
                self._meters.first_token.labels(self._model).observe(self._elapsed)
            return
        gaps, last = self._tokens[stage]
        for _ in range(number):
            gaps.observe((now - last) / number)
        self._tokens[stage] = gaps, now

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._record.began_s
