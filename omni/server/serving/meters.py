"""Counts and times what a server does, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from engine.interface.deferred import num_items
from omni.server.serving.recent_requests import RecentRequests, RequestRecord
from omni.server.serving.stage_meters import Metered, StageMeters
from omni.server.serving.token_gaps import Gaps, TokenGaps

if TYPE_CHECKING:
    from omni.requests.request import OmniOutput
    from omni.server.serving.asked import AskedRequest
    from omni.server.serving.guard import Client
    from omni.server.serving.request_spans import RequestSpans
    from stages import StageOutput

__all__ = ["Meters", "RequestMeter"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_FACTORS = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0)


class Meters:
    """What one server tells of itself; all names begin with ``omni_``.

    Args:
        pipelines: whose stages are read when ``/metrics`` or the page asks for the figures.

    Attributes:
        recent: the last requests.
        spans: makes spans of each request that ends; None where the server exports none.
    """

    def __init__(self, pipelines: Iterable[Metered]) -> None:
        self.recent = RecentRequests()
        self.spans: RequestSpans | None = None
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
        self.between_tokens = TokenGaps()
        self._registry.register(self.between_tokens)
        self.total = self._seconds("request_duration", "From arrival to the end, of whole answers.")
        self.real_time = Histogram(
            "omni_real_time_factor",
            "Seconds that a second of sound took.",
            ["model"],
            buckets=_FACTORS,
            registry=self._registry,
        )
        self._registry.register(StageMeters(tuple(pipelines)))

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
        request: which; a client stands for a request of which nothing was read.
    """

    def __init__(self, meters: Meters, model: str, request: AskedRequest | Client) -> None:
        self._meters = meters
        self._model = model
        self._record = RequestRecord(
            model, request.request_id or "", request.tenant, time.time(), time.monotonic()
        )
        self._record.traceparent = request.traceparent
        self._tokens: dict[str, _TokenTimes] = {}
        self._done: set[str] = set()  # stages, of which every later output tells the same

    def begin(self) -> None:
        """It is the request's turn."""
        self._record.turn_s = time.monotonic()
        self._meters.queue.labels(self._model).observe(self._elapsed)

    def note(self, output: OmniOutput) -> None:
        """Something came of it."""
        record = self._record
        for each in output.timeline:
            record.stages[each.stage] = each
        for name, stage in output.stages.items():
            if name not in self._done:
                self._note_tokens(stage)
                if stage.finished:
                    self._done.add(name)
            if record.first_audio_s is None and stage.audio_delta is not None:
                record.first_audio_s = time.monotonic()
                self._meters.first_audio.labels(self._model).observe(self._elapsed)
        if not output.finished:
            return
        if output.error is None:
            for stage in output.stages.values():
                if stage.audio is not None and stage.audio.duration_s:
                    factor = self._elapsed / stage.audio.duration_s
                    self._meters.real_time.labels(self._model).observe(factor)
            self.end("ok")
        else:
            self.end("refused" if output.refused else "failed")

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

    def _note_tokens(self, stage: StageOutput) -> None:
        """Time what came since the output before; tokens that come together share their time."""
        times = self._tokens.get(stage.stage)
        count = num_items(stage, "token_ids")
        if count <= (0 if times is None else times.count):
            return
        if times is None:
            gaps = self._meters.between_tokens.of(self._model, stage.stage)
            times = self._tokens[stage.stage] = _TokenTimes(gaps)
        now = time.monotonic()
        if self._record.first_token_s is None:
            self._record.first_token_s = now
            self._meters.first_token.labels(self._model).observe(self._elapsed)
        times.note(count, now)

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._record.began_s


@dataclass(slots=True)
class _TokenTimes:
    """When the tokens of one stage came."""

    gaps: Gaps
    count: int = 0
    last: float = 0.0

    def note(self, count: int, now: float) -> None:
        """There are so many now."""
        if self.count:
            number = count - self.count
            self.gaps.add((now - self.last) / number, number)
        self.count, self.last = count, now
