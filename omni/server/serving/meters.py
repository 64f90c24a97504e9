"""Counts and times what a server does, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from omni.requests.request import OmniDelta
from omni.server.serving.admission_queue import AdmissionQueue
from omni.server.serving.client import Client
from omni.server.serving.request_records import RecentRequests, RequestRecord, RequestSpans
from stages import StageStats
from stages.worker.stage_link import WorkerState

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
"""What :func:`_samples` gives, and the labels of it beside the stage's."""


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
    """A served pipeline, as far as it is read here."""

    name: str
    queue: AdmissionQueue

    def replica_stats(self) -> Mapping[str, Sequence[StageStats]]:
        """Every stage's counters, by replica."""

    def worker_states(self) -> Mapping[str, Sequence[WorkerState]]:
        """The state of the workers of stages that run elsewhere."""


_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_FACTORS = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0)


class Meters(Collector):
    """Everything that one server reports of itself; all names begin with ``omni_``.

    What it counts itself stands beside the stages' own counters, which are read when it is asked.

    ``recent`` has the last requests; ``spans``, where any are exported, makes spans of each.
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
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Read the stages' counters; see :class:`prometheus_client.registry.Collector`."""
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
        for name, field, what in _COUNTERS:
            counter = CounterMetricFamily(f"omni_stage_{name}", what, None, _STAGE)
            for replica_labels, stats in readings:
                counter.add_metric(replica_labels, getattr(stats, field))
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
    """Times one request; without an id of its own, one of which nothing was read."""

    def __init__(
        self, meters: Meters, model: str, client: Client, request_id: str | None = None
    ) -> None:
        self._meters = meters
        self._model = model
        self._record = RequestRecord(
            model, request_id or client.request_id, client.tenant, time.time(), time.monotonic()
        )
        self._record.traceparent = client.traceparent
        self._tokens: dict[str, tuple[Histogram, float]] = {}  # and when the last ones came
        self._sound_s: dict[str, float] = {}

    def begin(self) -> None:
        """It is the request's turn."""
        self._record.turn_s = time.monotonic()
        self._meters.queue.labels(self._model).observe(self._elapsed)

    def note(self, delta: OmniDelta) -> None:
        """Take note of what is new of it."""
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
                self._sound_s[name] = self._sound_s.get(name, 0.0) + new.audio.duration_s
            if new.whole_audio is not None:
                self._sound_s[name] = new.whole_audio.duration_s
        for name, number in num_tokens.items():
            self._note_tokens(name, number)
        if not delta.finished:
            return
        if delta.error is None:
            for duration_s in filter(None, self._sound_s.values()):
                factor = self._elapsed / duration_s
                self._meters.real_time.labels(self._model).observe(factor)
            self.end("ok")
        else:
            self.end("refused" if delta.refused else "failed")

    def end(self, status: str) -> None:
        """It has ended; only the first word on it counts."""
        record = self._record
        if not record.status:
            record.status, record.ended_s = status, time.monotonic()
            self._meters.requests.labels(self._model, status).inc()
            self._meters.recent.add(record)
            if self._meters.spans is not None:
                self._meters.spans.add(record)
            if status == "ok":
                self._meters.total.labels(self._model).observe(self._elapsed)

    def _note_tokens(self, stage: str, number: int) -> None:
        """Time new tokens; those that come together share their time."""
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
