"""Trace of a run: a file for trace viewers that shows where every request spent its time."""

from __future__ import annotations

import errno
import json
import os
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from stages.trace_events import RUN_AGAIN, StageEvent, Traced, this_clock
from stages.worker.messages import Abort, Command, Enter, Extend
from stages.worker.stage_worker import num_tensor_bytes

_ARRIVALS = ("make prompt", "take chunk")
"""Events by which a stage's worker reports that its input has arrived."""
_MAX_REQUESTS = 10_000
"""Maximum number of requests whose tracks are remembered; older ones are named again on use."""
_MAX_UNWRITTEN = 2**16
"""Number of bytes, and age, at which buffered events are written."""
_FLUSH_INTERVAL_S = 1.0
_REQUEST_TRACKS = 1_000_000
"""Requests' tracks are numbered above this, processes below. Events of a whole worker are on the
track with its process's own number, the main thread. Perfetto treats a track 0 like that, too, and
would merge it with a request's track that has the process's number."""


class TraceError(OSError):
    """A trace could not be completed; the traced run itself is not affected."""


@dataclass(slots=True)
class _Sent:
    """A transfer to a stage that has not arrived yet."""

    start_s: float
    sources: str
    num_bytes: int


@dataclass(slots=True)
class _Request:
    """Trace state of one request.

    Attributes:
        named: processes in which its track has been named.
        until_us: current end of its track, by process.
        ended_s: end of the last step that advanced it, by stage.
        sent: transfers that have not arrived yet, by stage.
        given: all transfers, by stage.
    """

    track: int
    named: set[int] = field(default_factory=set)
    until_us: dict[int, float] = field(default_factory=dict)
    ended_s: dict[str, float] = field(default_factory=dict)
    sent: dict[str, deque[_Sent]] = field(default_factory=dict)
    given: dict[str, list[_Sent]] = field(default_factory=dict)


class Trace:
    """Writes events as they happen, in Chrome's trace event format.

    Every worker of a stage is a process, every request a track in it, and each worker's steps a
    separate track; transfers between stages are drawn next to them, with their size. Perfetto and
    chrome://tracing open the file.

    It is written under another name (``out.partial.json``), which viewers also open if the run was
    killed, and renamed at the end. Only a bounded number of requests is remembered. Not
    thread-safe.

    Args:
        path: path of the file; an existing one is replaced at the end.
        stages: names of the pipeline's stages, in order.

    Attributes:
        error: reason why nothing more is written, such as a full disk; None without one.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | Path, stages: Sequence[str]) -> None:
        self.path = Path(path)
        self.error: OSError | None = None
        self._partial_path = self.path.with_name(f"{self.path.stem}.partial{self.path.suffix}")
        if self.path.exists() and not self.path.is_file():
            raise OSError(errno.EINVAL, "is there and no regular file", str(self.path))
        self._file = self._partial_path.open("wb", buffering=0)
        self._unwritten = bytearray(b"[")
        self._separator = "\n"
        self._start_s = self._written_s = time.monotonic()
        self._order = {name: place for place, name in enumerate(stages)}
        self._processes: dict[tuple[str, int], int] = {}
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        self._tracks = count(_REQUEST_TRACKS + 1)
        self._transfers = count(1)
        self._until_us: dict[int, float] = {}
        # By clock, how far this machine's clock is ahead; the best estimate of all messages.
        self._offsets: dict[str, float] = {}

    def sending(self, stage: str, command: Command) -> None:
        """Record the transfer that a command starts, or the end of the request's transfers."""
        if isinstance(command, Enter | Abort):
            self.left(stage, command.request_id)
        match command:
            case Enter(sources=sources) | Extend(source=sources) if sources:
                given = sources if isinstance(sources, tuple) else (sources,)
                names = [each.stage for each in given]
                request = self._request(command.request_id)
                ends = [request.ended_s[name] for name in names if name in request.ended_s]
                # The last step of a source that was paused since may end later than the chunk.
                start_s = max(ends, default=time.monotonic())
                sent = _Sent(start_s, " + ".join(names), num_tensor_bytes(given))
                request.sent.setdefault(stage, deque()).append(sent)
                request.given.setdefault(stage, []).append(sent)

    def left(self, stage: str, request_id: str) -> None:
        """Forget the transfers of a request to a stage that it has left."""
        request = self._requests.get(request_id)
        if request is not None:
            request.sent.pop(stage, None)
            request.given.pop(stage, None)

    def take(self, stage: str, traced: Traced) -> None:
        """Write the events that a stage's worker has reported."""
        offset = self._offset(traced)
        process = self._process(stage, traced.replica)
        for event in traced.events:
            track, until_us = process, self._until_us
            if event.request_id is not None:
                track = self._track(event.request_id, process)
                until_us = self._request(event.request_id).until_us
                self._note(stage, process, event, offset)
            written = self._format_event(event, offset, until_us.get(process, 0.0))
            until_us[process] = round(written["ts"] + written.get("dur", 0.0), 3)
            self._write(written | {"pid": process, "tid": track})

    def close(self) -> None:
        """Complete the file and rename it. Idempotent.

        Raises:
            TraceError: it could not be written; the incomplete file is left under its other name.
        """
        if not self._file.closed:
            self._unwritten += b"\n]\n"
            self._flush()
            try:
                self._file.close()
                if self.error is None:
                    os.replace(self._partial_path, self.path)
            except OSError as error:
                self.error = self.error or error
        if self.error is not None:
            reason = self.error.strerror
            raise TraceError(self.error.errno, reason, str(self._partial_path)) from self.error

    def discard(self) -> None:
        """Delete the file, because there was no run."""
        self._file.close()
        self._partial_path.unlink(missing_ok=True)

    def _offset(self, traced: Traced) -> float:
        """Return the offset from a worker's clock to this machine's.

        For clocks of other machines it is estimated from messages: each difference includes the
        time in transit, so the smallest one seen is the best estimate.
        """
        if traced.clock == this_clock():
            return 0.0
        seen = time.monotonic() - traced.told_s
        self._offsets[traced.clock] = min(self._offsets.get(traced.clock, seen), seen)
        return self._offsets[traced.clock]

    def _note(self, stage: str, process: int, event: StageEvent, offset: float) -> None:
        """Record the end of a request's last step, and write transfers that have arrived."""
        assert event.request_id is not None
        request = self._request(event.request_id)
        if event.name == RUN_AGAIN:
            again = [replace(each, start_s=event.start_s) for each in request.given.get(stage, ())]
            request.sent[stage] = deque(again)
        if event.name in _ARRIVALS and (on_way := request.sent.get(stage)):
            sent = on_way.popleft()
            for each in self._transfer(sent, process, event, offset):
                self._write(each)
        if event.end_s is not None and event.name == "step":
            request.ended_s[stage] = event.end_s + offset

    def _transfer(
        self, sent: _Sent, process: int, event: StageEvent, offset: float
    ) -> Iterator[dict[str, Any]]:
        """Yield the events of a transfer; it overlaps with steps, so it is an async event."""
        end_s = max(event.start_s + offset, sent.start_s)
        common = {
            "name": "transfer",
            "cat": "transfer",
            "id": f"transfer-{next(self._transfers)}",
            "pid": process,
            "tid": process,
        }
        args = {"request": event.request_id, "from": sent.sources, "bytes": sent.num_bytes}
        yield common | {"ph": "b", "ts": self._micros(sent.start_s), "args": args}
        yield common | {"ph": "e", "ts": self._micros(end_s)}

    def _format_event(self, event: StageEvent, offset: float, until_us: float) -> dict[str, Any]:
        """Format an event, clipped to start after its track's end: clocks may be slightly off."""
        start_us = max(self._micros(event.start_s + offset), until_us)
        written: dict[str, Any] = {
            "name": event.name,
            "cat": "worker" if event.request_id is None else "request",
            "ts": start_us,
        }
        if event.end_s is None:
            written |= {"ph": "i", "s": "t"}
        else:
            end_us = max(self._micros(event.end_s + offset), start_us)
            written |= {"ph": "X", "dur": round(end_us - start_us, 3)}
        if event.args:
            written["args"] = dict(event.args)
        return written

    def _micros(self, time_s: float) -> float:
        """Convert to microseconds since the start of the trace; earlier times become 0."""
        return round(max(time_s - self._start_s, 0.0) * 1e6, 3)

    def _process(self, stage: str, replica: int) -> int:
        """Return the number of a worker's process; name it on first use."""
        key = (stage, replica)
        if key not in self._processes:
            process = self._processes[key] = len(self._processes) + 1
            name = stage if replica == 0 else f"{stage} (replica {replica})"
            place = self._order.get(stage, len(self._order))
            self._describe("process_name", process, process, name=name)
            order = place * 1_000 + replica
            self._describe("process_sort_index", process, process, sort_index=order)
            self._describe("thread_name", process, process, name="steps")
        return self._processes[key]

    def _request(self, request_id: str) -> _Request:
        request = self._requests.get(request_id)
        if request is None:
            request = self._requests[request_id] = _Request(next(self._tracks))
            if len(self._requests) > _MAX_REQUESTS:
                self._requests.popitem(last=False)
        else:
            self._requests.move_to_end(request_id)
        return request

    def _track(self, request_id: str, process: int) -> int:
        """Return the number of a request's track; name it on first use in a process."""
        request = self._request(request_id)
        if process not in request.named:
            request.named.add(process)
            self._describe("thread_name", process, request.track, name=request_id)
            order = request.track - _REQUEST_TRACKS
            self._describe("thread_sort_index", process, request.track, sort_index=order)
        return request.track

    def _describe(self, what: str, process: int, track: int, **args: str | int) -> None:
        self._write({"name": what, "ph": "M", "pid": process, "tid": track, "args": args})

    def _write(self, event: Mapping[str, Any]) -> None:
        self._unwritten += (self._separator + json.dumps(event, separators=(",", ":"))).encode()
        self._separator = ",\n"
        now_s = time.monotonic()
        if len(self._unwritten) >= _MAX_UNWRITTEN or now_s - self._written_s >= _FLUSH_INTERVAL_S:
            self._written_s = now_s
            self._flush()

    def _flush(self) -> None:
        """Write the buffered events; a full disk ends only the trace."""
        left, self._unwritten = memoryview(self._unwritten), bytearray()
        if self.error is not None or self._file.closed:
            return
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError as error:
            self.error = error
