"""Traces where the requests of one stage spend their time there, and what its worker did when."""

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

_MOST_EVENTS = 1_000
"""Kept while there are no other events."""


Args: TypeAlias = Mapping[str, int | float | str]


@dataclass(slots=True)
class _Track:
    """What is known of one request in the stage; times are ``time.monotonic``.

    Attributes:
        ticket: of it in this stage.
        since: until when all was reported.
        rests_since: when it was paused; None while it is not.
        lacks_since: when it ran out of input; None while it has some.
    """

    ticket: int
    since: float
    is_inside: bool = False
    has_run: bool = False
    rests_since: float | None = None
    lacks_since: float | None = None


class TracedWorker(StageWorker):
    """Runs a stage as a :class:`StageWorker` does, and reports it ahead of its events.

    A request's events in one stage do not overlap, and come in the order of their beginnings::

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
        self._moved: list[tuple[int, OutputDelta]] = []
        self._begin()

    def _begin(self) -> None:
        """Know of no request, and of nothing that happened."""
        self._spans: list[StageEvent] = []
        self._tracks: dict[str, _Track] = {}
        self._request_ids: dict[int, str] = {}
        self._counted = self.stage.stats()

    def send(self, command: Command) -> None:
        """See :class:`StageWorker`."""
        start_s, num_events = time.monotonic(), len(self._events)
        super().send(command)
        end_s = time.monotonic()
        self._commanded(command, start_s, end_s)
        self._note_failures(self._events[num_events:], end_s)

    def work(self) -> None:
        """See :class:`StageWorker`."""
        start_s, num_events = time.monotonic(), len(self._events)
        super().work()
        end_s = time.monotonic()
        moved, self._moved = self._moved, []
        # What was let in, or paused, was so before the stage's step.
        for request_id, state in self._states.items():
            if (track := self._tracks.get(request_id)) is not None:
                self._look(track, state, start_s)
        counted, before = self.stage.stats(), self._counted
        self._counted = counted
        if moved or counted.num_steps != before.num_steps:
            args = _step_args(counted, before, len(moved))
            self._spans.append(StageEvent("step", start_s, end_s, None, args))
        for ticket, delta in moved:
            if (moved_id := self._request_ids.get(ticket)) is not None:
                self._ran(moved_id, delta, start_s, end_s)
        self._note_failures(self._events[num_events:], end_s)
        for request_id, state in self._states.items():
            if state.is_streamed and state.is_inside and not state.pending:
                self._note_lack(request_id, end_s)

    def _emit(self, state: RequestState, delta: OutputDelta) -> None:
        self._moved.append((state.enter.ticket, delta))
        super()._emit(state, delta)

    def drop_all(self) -> None:
        """See :class:`~stages.worker.stage_link.StageLink`."""
        super().drop_all()
        self._begin()

    def traces(self) -> list[Traced]:
        """See :class:`~stages.worker.stage_link.StageLink`; kept until there are other events."""
        if not self._spans or (not self._events and len(self._spans) < _MOST_EVENTS):
            return []
        spans, self._spans = tuple(self._spans), []
        return [Traced(spans, self._replica, this_clock(), time.monotonic())]

    def _commanded(self, command: Command, start_s: float, end_s: float) -> None:
        """Note a command that was done."""
        request_id = command.request_id
        if isinstance(command, Enter):
            self._entered(command, start_s, end_s)
        track = self._tracks.get(request_id)
        if track is None:
            return
        match command:
            case Extend():
                self._end_lack(track, start_s, request_id)
                if not track.is_inside:
                    self._span("prepare", track, track.since, start_s, request_id)
                args: Args = {"from": command.source.stage, "first row": command.first_row}
                self._span("take chunk", track, start_s, end_s, request_id, args)
            case Abort():
                self._moment("aborted", end_s, request_id)
                self._forget(request_id)
                return
        if (state := self._states.get(request_id)) is not None:
            self._look(track, state, end_s)

    def _note_failures(self, events: Iterable[Event], end_s: float) -> None:
        """Take note of requests that cannot go on."""
        for event in events:
            if isinstance(event, Failed):
                request_id = self._request_ids.get(event.ticket)
                if request_id is not None:
                    self._moment("failed", end_s, request_id, {"error": event.error})
                    self._forget(request_id)

    def _entered(self, enter: Enter, start_s: float, end_s: float) -> None:
        self._tracks[enter.request_id] = track = _Track(enter.ticket, start_s)
        self._request_ids[enter.ticket] = enter.request_id
        if enter.sources:
            args = {"from": " + ".join(source.stage for source in enter.sources)}
            self._span("make prompt", track, start_s, end_s, enter.request_id, args)

    def _look(self, track: _Track, state: RequestState, now_s: float) -> None:
        """See what has changed with a request."""
        request_id = state.request_id
        if state.is_inside and not track.is_inside:
            track.is_inside = True
            self._span("prepare", track, track.since, now_s, request_id)
        if state.is_paused and track.rests_since is None:
            track.rests_since = max(now_s, track.since)
        elif not state.is_paused and track.rests_since is not None:
            self._span("resting", track, track.rests_since, now_s, request_id)
            track.rests_since = None

    def _ran(self, request_id: str, delta: OutputDelta, start_s: float, end_s: float) -> None:
        """A step has moved a request."""
        track, metrics = self._tracks[request_id], delta.metrics
        self._end_lack(track, start_s, request_id)
        if not track.has_run:
            track.has_run = True
            self._waited(track, request_id, metrics.queue_s if metrics else None, start_s)
        self._span("step", track, start_s, end_s, request_id)
        if delta.finished:
            if delta.num_cached_tokens:
                counts = {"tokens": delta.num_cached_tokens, "of": delta.num_prompt_tokens}
                self._moment("hit", end_s, request_id, counts)
            if metrics is not None and metrics.num_preemptions:
                self._moment("preempted", end_s, request_id, {"times": metrics.num_preemptions})
            self._forget(request_id)

    def _waited(
        self, track: _Track, request_id: str, queue_s: float | None, start_s: float
    ) -> None:
        """Tell how long a request waited before it first ran, and of steps without outputs."""
        first_s = start_s if queue_s is None else min(start_s, track.since + queue_s)
        self._span("waiting", track, track.since, first_s, request_id)
        if first_s < start_s:
            self._span("prefill", track, first_s, start_s, request_id)

    def _end_lack(self, track: _Track, now_s: float, request_id: str) -> None:
        if track.lacks_since is not None:
            self._span("waiting for input", track, track.lacks_since, now_s, request_id)
            track.lacks_since = None

    def _note_lack(self, request_id: str, now_s: float) -> None:
        track = self._tracks.get(request_id)
        if track is not None and track.lacks_since is None and self.stage.needs_input(request_id):
            track.lacks_since = max(now_s, track.since)

    def _forget(self, request_id: str) -> None:
        track = self._tracks.pop(request_id, None)
        if track is not None:
            del self._request_ids[track.ticket]

    def _span(
        self,
        name: str,
        track: _Track,
        start_s: float,
        end_s: float,
        request_id: str,
        args: Args | None = None,
    ) -> None:
        """Report a piece of a request's time, which begins where the last one ended at least."""
        start_s = max(start_s, track.since)
        end_s = max(start_s, end_s)
        track.since = end_s
        if end_s > start_s or args:
            self._spans.append(StageEvent(name, start_s, end_s, request_id, args or {}))

    def _moment(
        self,
        name: str,
        at_s: float,
        request_id: str,
        args: Args | None = None,
    ) -> None:
        self._spans.append(StageEvent(name, at_s, None, request_id, args or {}))


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
