"""What the stages of all pipelines count, read when Prometheus looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from omni.server.serving.turn_queue import TurnQueue
    from stages import StageStats
    from stages.worker.stage_link import WorkerState

__all__ = ["Metered", "StageMeters"]

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
    ("restarts", "num_restarts", "Times that a worker was started again, or an engine built anew."),
    ("transfers", "num_transfers", "Outputs and chunks that other stages handed over."),
    ("transferred_bytes", "transferred_bytes", "Bytes of the tensors in these."),
)
_GAUGES = (
    ("running", "num_running", "Requests in steps."),
    ("waiting", "num_waiting", "Requests that wait for a step."),
)


class Metered(Protocol):
    """A pipeline, as far as it is read here."""

    @property
    def name(self) -> str:
        """The model's."""

    @property
    def turn_queue(self) -> TurnQueue:
        """Whose turn it is."""

    def replica_stats(self) -> Mapping[str, Sequence[StageStats]]:
        """Every stage's counters, by replica."""

    def worker_states(self) -> Mapping[str, Sequence[WorkerState]]:
        """How the workers of stages that run elsewhere are doing."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """What one replica has counted; ``labels`` are those of ``_STAGE``."""

    labels: tuple[str, str, str]
    stats: StageStats


class StageMeters(Collector):
    """Reads the stages' own counters; all names begin with ``omni_``.

    Args:
        pipelines: whose stages are read.
    """

    def __init__(self, pipelines: Sequence[Metered]) -> None:
        self._pipelines = tuple(pipelines)

    def collect(self) -> Iterator[Metric]:
        """See :class:`prometheus_client.registry.Collector`."""
        for name, what in (("running", "have had their turn"), ("waiting", "wait for it")):
            gauge = GaugeMetricFamily(
                f"omni_requests_{name}", f"Requests that {what}.", None, ["model"]
            )
            for pipeline in self._pipelines:
                gauge.add_metric([pipeline.name], getattr(pipeline.turn_queue, f"num_{name}"))
            yield gauge
        readings = [
            _Reading((pipeline.name, stage, str(replica)), stats)
            for pipeline in self._pipelines
            for stage, replicas in pipeline.replica_stats().items()
            for replica, stats in enumerate(replicas)
        ]
        for name, field, what in _COUNTERS:
            counter = CounterMetricFamily(f"omni_stage_{name}", what, None, _STAGE)
            for reading in readings:
                counter.add_metric(reading.labels, getattr(reading.stats, field))
            yield counter
        for name, field, what in _GAUGES:
            yield _gauge(name, what, (), readings, partial(_count, field))
        yield _gauge("blocks", "Large pages by state.", ("state",), readings, _pages)
        yield _gauge(
            "group_blocks",
            "Blocks of each group of layers by state.",
            ("group", "kind", "state"),
            readings,
            _group_blocks,
        )
        yield _gauge("cache_bytes", "Bytes of each cache.", ("cache",), readings, _cache_bytes)
        yield _gauge(
            "hit_rate", "Cached tokens of all tokens of inputs, since the start.", (), readings,
            _hit_rate,
        )  # fmt: skip
        yield self._workers()

    def _workers(self) -> Metric:
        up = GaugeMetricFamily(
            "omni_stage_worker_up", "Whether a worker takes requests.", None, _STAGE
        )
        for pipeline in self._pipelines:
            for stage, workers in pipeline.worker_states().items():
                for replica, worker in enumerate(workers):
                    up.add_metric([pipeline.name, stage, str(replica)], worker.state == "up")
        return up


_Samples = list[tuple[tuple[str, ...], float]]


def _gauge(
    name: str,
    what: str,
    labels: tuple[str, ...],
    readings: Sequence[_Reading],
    samples: Callable[[StageStats], _Samples],
) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(f"omni_stage_{name}", what, None, (*_STAGE, *labels))
    for reading in readings:
        for more, value in samples(reading.stats):
            gauge.add_metric((*reading.labels, *more), value)
    return gauge


def _count(field: str, stats: StageStats) -> _Samples:
    return [((), getattr(stats, field))]


def _pages(stats: StageStats) -> _Samples:
    states = ("free", "held", "cached") if stats.kv is not None else ()
    return [((state,), getattr(stats.kv, state)) for state in states]


def _group_blocks(stats: StageStats) -> _Samples:
    groups = stats.kv.groups if stats.kv is not None else ()
    return [
        ((str(index), group.kind, state), getattr(group, state))
        for index, group in enumerate(groups)
        for state in ("held", "cached")
    ]


def _cache_bytes(stats: StageStats) -> _Samples:
    sizes = []
    if stats.kv is not None:
        sizes += [("kv", stats.kv.nbytes), ("stage_outputs", stats.kv.output_bytes)]
    if stats.encoder_cache is not None:
        sizes.append(("encoder", stats.encoder_cache.nbytes))
    return [((cache,), size) for cache, size in sizes]


def _hit_rate(stats: StageStats) -> _Samples:
    tokens = stats.prompt_tokens
    return [((), stats.cached_tokens / tokens)] if tokens else []
