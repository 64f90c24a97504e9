"""Traces where requests spend their time in one stage, and what its worker did when."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from engine.interface.outputs import OutputDelta
from stages.stage import Stage, StageStats, Transform
from stages.trace_events import StageEvent, Traced, this_clock
from stages.worker.messages import Abort, Command, Enter, Event, Extend, Failed, StreamedEdge
from stages.worker.request_state import RequestState
from stages.worker.stage_worker import StageWorker

_MAX_EVENTS = 1_000
"""Number of trace events that are kept while there are no other events."""


Args: TypeAlias = Mapping[str, int | float | str]


@dataclass(slots=True)
class _Track:
    """Trace of one request in the stage; times are ``time.monotonic``.

    Attributes:
        ticket: its ticket in this stage.
        spans: list of the whole worker, to which events are appended.
        since: end of the last reported span.
        paused_since: time at which it was paused; None while it is not.
        starved_since: time at which it ran out of input; None while it has some.
    """

    request_id: str
    ticket: int
    spans: list[StageEvent]
    since: float
    is_inside: bool = False
    has_run: bool = False
    paused_since: float | None = None
    starved_since: float | None = None

    def span(self, name: str, start_s: float, end_s: float, args: Args | None = None) -> None:
        """Report a span of its time; the start is clipped to the end of the previous span."""
        start_s = max(start_s, self.since)
        self.since = end_s = max(start_s, end_s)
        if end_s > start_s or args:
            self.spans.append(StageEvent(name, start_s, end_s, self.request_id, args or {}))

    def moment(self, name: str, at_s: float, args: Args | None = None) -> None:
        """Report an instantaneous event."""
        self.spans.append(StageEvent(name, at_s, None, self.request_id, args or {}))

    def observe(self, state: RequestState, now_s: float) -> None:
        """Report state changes of the request."""
        if state.is_inside and not self.is_inside:
            self.is_inside = True
            self.span("prepare", self.since, now_s)
        if state.is_paused and self.paused_since is None:
            self.paused_since = max(now_s, self.since)
        elif not state.is_paused and self.paused_since is not None:
            self.span("resting", self.paused_since, now_s)
            self.paused_since = None

    def end_wait(self, now_s: float) -> None:
        """Report the end of a wait for input, if there was one."""
        if self.starved_since is not None:
            self.span("waiting for input", self.starved_since, now_s)
            self.starved_since = None

    def ran(self, delta: OutputDelta, start_s: float, end_s: float) -> None:
        """Report a step with output; the time before its first one was waiting and prefill."""
        metrics = delta.metrics
        self.end_wait(start_s)
        if not self.has_run:
            self.has_run = True
            queue_s = None if metrics is None else metrics.queue_s
            first_s = start_s if queue_s is None else min(start_s, self.since + queue_s)
            self.span("waiting", self.since, first_s)
            if first_s < start_s:
                self.span("prefill", first_s, start_s)
        self.span("step", start_s, end_s)
        if delta.finished and delta.num_cached_tokens:
            counts = {"tokens": delta.num_cached_tokens, "of": delta.num_prompt_tokens}
            self.moment("hit", end_s, counts)
        if delta.finished and metrics is not None and metrics.num_preemptions:
            self.moment("preempted", end_s, {"times": metrics.num_preemptions})


class TracedWorker(StageWorker):
    """A :class:`StageWorker` that reports traces ahead of its events.

    A request's spans in one stage do not overlap, and are ordered by start::

        make prompt | prepare | waiting | prefill | step | step | resting | step | waiting for input
    """

    def __init__(
        self,
        stage: Stage,
        transform: Transform | None,
        edges: Sequence[StreamedEdge] = (),
        *,
        replica: int = 0,
    ) -> None:
        super().__init__(stage, transform, edges)
        self._replica = replica
        self._reset()

    def _reset(self) -> None:
        """Reset the trace: no requests, no events."""
        self._moved: list[OutputDelta] = []
        self._spans: list[StageEvent] = []
        self._tracks: dict[str, _Track] = {}
        self._counted = self.stage.stats()

    def send(self, command: Command) -> None:
        """See :class:`StageWorker`."""
        start_s, num_events = time.monotonic(), len(self._events)
        super().send(command)
        end_s = time.monotonic()
        self._trace_command(command, start_s, end_s)
        self._trace_failures(self._events[num_events:], end_s)

    def work(self) -> None:
        """See :class:`StageWorker`."""
        start_s, num_events = time.monotonic(), len(self._events)
        super().work()
        end_s = time.monotonic()
        moved, self._moved = self._moved, []
        # Requests were admitted or paused before the stage's step.
        for request_id, state in self._states.items():
            if (track := self._tracks.get(request_id)) is not None:
                track.observe(state, start_s)
        counted, before = self.stage.stats(), self._counted
        self._counted = counted
        if moved or counted.num_steps != before.num_steps:
            args = _step_args(counted, before, len(moved))
            self._spans.append(StageEvent("step", start_s, end_s, None, args))
        for delta in moved:
            if (track := self._tracks.get(delta.request_id)) is not None:
                track.ran(delta, start_s, end_s)
                if delta.finished:
                    del self._tracks[delta.request_id]
        self._trace_failures(self._events[num_events:], end_s)
        for request_id, state in self._states.items():
            track = self._tracks.get(request_id)
            may_starve = state.is_streamed and state.is_inside and not state.pending
            if not may_starve or track is None or track.starved_since is not None:
                continue
            if self.stage.needs_input(request_id):
                track.starved_since = max(end_s, track.since)

    def _emit(self, state: RequestState, delta: OutputDelta) -> None:
        self._moved.append(delta)
        super()._emit(state, delta)

    def drop_all(self) -> None:
        """See :class:`~stages.worker.stage_link.StageLink`."""
        super().drop_all()
        self._reset()

    def events(self) -> Sequence[Event | Traced]:
        """See :class:`~stages.worker.stage_link.StageLink`; spans are kept until there are any."""
        events = super().events()
        if not self._spans or (not events and len(self._spans) < _MAX_EVENTS):
            return events
        spans = tuple(self._spans)
        self._spans.clear()
        return [Traced(spans, self._replica, this_clock(), time.monotonic()), *events]

    def _trace_command(self, command: Command, start_s: float, end_s: float) -> None:
        """Record an executed command."""
        request_id = command.request_id
        if isinstance(command, Enter):
            track = _Track(request_id, command.ticket, self._spans, start_s)
            self._tracks[request_id] = track
            if command.sources:
                names = " + ".join(source.stage for source in command.sources)
                track.span("make prompt", start_s, end_s, {"from": names})
        elif request_id in self._tracks:
            track = self._tracks[request_id]
        else:
            return
        match command:
            case Extend():
                track.end_wait(start_s)
                if not track.is_inside:
                    track.span("prepare", track.since, start_s)
                args: Args = {"from": command.source.stage, "first row": command.first_row}
                track.span("take chunk", start_s, end_s, args)
            case Abort():
                track.moment("aborted", end_s)
                del self._tracks[request_id]
                return
        if (state := self._states.get(request_id)) is not None:
            track.observe(state, end_s)

    def _trace_failures(self, events: Iterable[Event], end_s: float) -> None:
        """Record failed requests."""
        for event in events:
            if isinstance(event, Failed):
                failed = [each for each in self._tracks.values() if each.ticket == event.ticket]
                for track in failed:
                    track.moment("failed", end_s, {"error": event.error})
                    del self._tracks[track.request_id]


def _step_args(now: StageStats, before: StageStats, num_moved: int) -> dict[str, int]:
    added = now.since(before)
    counts = {
        "outputs": num_moved,
        "input tokens": added.prompt_tokens,
        "hit tokens": added.cached_tokens,
        "generated tokens": added.generated_tokens,
        "preemptions": added.num_preemptions,
    }
    return {name: count for name, count in counts.items() if count}
