"""Records of requests that have ended: the last ones, and spans of OpenTelemetry.

A span is made for every request, and below it one for each of its stages, when it has ended.
Nothing of OpenTelemetry is imported unless spans are wanted: by environment variables, as
OpenTelemetry's own programs read them, or by a program around the server that has set a provider.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from engine.interface.log_fields import package_logger
from omni.requests.request import StageTime

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

_logger = package_logger(__name__)

_KEPT = 200
_KEPT_REJECTED = 50
_REJECTED = "rejected"


@dataclass(slots=True)
class RequestRecord:
    """One request, without its prompt and without its output.

    Times are those of ``time.monotonic`` in this process, and None if they never came; only
    ``arrived_s`` is in seconds since 1970. It was handed to the pipeline at ``turn_s``.

    Attributes:
        tenant: see :class:`~omni.server.serving.client.Client`.
        status: ok, refused, rejected, failed or aborted.
        traceparent: as W3C's Trace Context writes it; not checked.
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
        """The same as JSON has it, in seconds since it arrived."""
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
            # What it was taken out of, it left when it ended.
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
    """Keeps the last requests of all pipelines.

    Those for which there was no room are kept apart: they come by the hundreds in a second, and
    would leave nothing of the others.
    """

    def __init__(self) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=_KEPT)
        self._rejected: deque[RequestRecord] = deque(maxlen=_KEPT_REJECTED)

    def add(self, record: RequestRecord) -> None:
        """Add one that has ended."""
        (self._rejected if record.status == _REJECTED else self._records).append(record)

    def of(self, model: str, tenant: str | None) -> Iterator[RequestRecord]:
        """Yield those of a pipeline that came with one key, the one that ended last first."""
        kept = [*self._records, *self._rejected]
        for record in sorted(kept, key=lambda each: each.ended_s, reverse=True):
            if record.model == model and record.tenant == tenant:
                yield record


_NAME = "omni-pipeline"
_EXPORTERS = "opentelemetry_traces_exporter"
"""Entry points by which OpenTelemetry finds exporters: console and otlp, among others."""
_OTLP = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class RequestSpans:
    """Makes spans of requests that have ended; ``close`` sends what has not been sent."""

    def __init__(self, tracer: Tracer, close: Callable[[], object] = lambda: None) -> None:
        self._tracer = tracer
        self.close = close

    def add(self, record: RequestRecord) -> None:
        """Make the spans of a request; it belongs to the trace that its client named, if any."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        attributes: dict[str, str | int] = {
            "omni.model": record.model,
            "omni.request_id": record.request_id,
            "omni.status": record.status,
        }
        span = self._begin(
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
                attributes=_attributes(record, spent),
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
        """Make the span of a request that was refused before it came to a pipeline, just now."""
        end = time.time_ns()
        start = end - round(took_s * 1e9)
        self._begin(name, traceparent, {"omni.status": "refused", **attributes}, start).end(end)

    def _begin(
        self, name: str, traceparent: str | None, attributes: Mapping[str, str | int], start: int
    ) -> Span:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {} if traceparent is None else {"traceparent": traceparent}
        context = TraceContextTextMapPropagator().extract(carrier)
        return self._tracer.start_span(name, context, SpanKind.SERVER, attributes, start_time=start)


def spans_by_environment(environment: Mapping[str, str] = os.environ) -> RequestSpans | None:
    """Make spans as the environment says; None if it asks for none.

    A provider that the program around has set, such as ``opentelemetry-instrument``, is used. Else
    ``OTEL_TRACES_EXPORTER`` names exporters (``otlp``, ``console``, ...), or an endpoint of OTLP is
    given; all other variables of OpenTelemetry are read by it. What is missing is a warning: a
    server works without being watched.
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
    # The server shuts it down itself, so it needs no handler at exit.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    known = {each.name: each for each in entry_points(group=_EXPORTERS)}
    for wanted in names:
        name = _otlp_by_protocol(known, environment) if wanted == "otlp" else wanted
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


def _otlp_by_protocol(known: Collection[str], environment: Mapping[str, str]) -> str:
    """Find the exporter that ``otlp`` means: that of the wanted protocol, else one there is."""
    wanted = next((environment[name] for name in _PROTOCOLS if environment.get(name)), None)
    if wanted is not None:
        return _OTLP.get(wanted, f"otlp by {wanted}")
    return next((name for name in _OTLP.values() if name in known), "otlp")


def _attributes(record: RequestRecord, time: StageTime) -> dict[str, str | int | bool]:
    return {
        "omni.model": record.model,
        "omni.stage": time.stage,
        "omni.prompt_tokens": time.num_prompt_tokens,
        "omni.cached_tokens": time.num_cached_tokens,
        "omni.generated_tokens": time.num_tokens,
        "omni.preemptions": time.num_preemptions,
        "omni.is_whole": time.ended_s is not None,
    }


def _nanos(record: RequestRecord, time_s: float) -> int:
    """Convert a time of this process's clock to nanoseconds since 1970."""
    return round((record.arrived_s + (time_s - record.began_s)) * 1e9)
