"""A trace of a run: where every request spent its time, in a file that trace viewers open."""

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

_RECEIPTS = ("make prompt", "take chunk")
"""Events by which a stage's worker tells that something has come."""
_MOST_REQUESTS = 10_000
"""Requests whose tracks are remembered; those of older ones are named again if more comes."""
_MOST_UNWRITTEN = 2**16
"""Bytes, and how long they may be kept."""
_WRITTEN_AFTER_S = 1.0
_BELOW_REQUESTS = 1_000_000
"""Requests' tracks are numbered from here on, and processes below. What is about a whole worker is
on the track with its process's own number: the main thread. Perfetto takes a track 0 for that, too,
and draws it into one of a request if this has the process's number."""


class TraceError(OSError):
    """A trace could not be written to its end; the run that it is of is not concerned."""


@dataclass(slots=True)
class _Sent:
    """Something on its way to a stage."""

    start_s: float
    sources: str
    num_bytes: int


@dataclass(slots=True)
class _Request:
    """What is known of one request.

    Attributes:
        named: the processes in which its track has its name.
        until_us: by process, where its track there ends so far.
        ended_s: by stage, when the last step ended that moved it there.
        sent: by stage, what has not arrived yet.
        given: by stage, all that was sent there.
    """

    track: int
    named: set[int] = field(default_factory=set)
    until_us: dict[int, float] = field(default_factory=dict)
    ended_s: dict[str, float] = field(default_factory=dict)
    sent: dict[str, deque[_Sent]] = field(default_factory=dict)
    given: dict[str, list[_Sent]] = field(default_factory=dict)


class Trace:
    """Writes what happens, as it happens, in Chrome's trace event format.

    Every worker of a stage is a process, every request a track in it, and each worker's steps a
    track of their own; what goes from stage to stage is drawn beside, with its bytes. Perfetto and
    chrome://tracing open the file.

    It is written under another name (``out.partial.json``), which viewers open as well if the run
    was killed, and moved in the end. Only a bounded number of requests is remembered. For one
    thread at a time.

    Args:
        path: of the file; what is there is replaced in the end.
        stages: names of the pipeline's, in their order.

    Attributes:
        error: why nothing more is written, such as a full disk; None while all is well.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | Path, stages: Sequence[str]) -> None:
        self.path = Path(path)
        self.error: OSError | None = None
        self._aside = self.path.with_name(f"{self.path.stem}.partial{self.path.suffix}")
        if self.path.exists() and not self.path.is_file():
            raise OSError(errno.EINVAL, "is there and no regular file", str(self.path))
        self._file = self._aside.open("wb", buffering=0)
        self._unwritten = bytearray(b"[")
        self._separator = "\n"
        self._start_s = self._written_s = time.monotonic()
        self._order = {name: place for place, name in enumerate(stages)}
        self._processes: dict[tuple[str, int], int] = {}
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        self._tracks = count(_BELOW_REQUESTS + 1)
        self._transfers = count(1)
        self._until_us: dict[int, float] = {}
        # By clock, how far ahead this machine's is; the nearest that any message has shown.
        self._offsets: dict[str, float] = {}

    def sending(self, stage: str, command: Command) -> None:
        """Take note of what a command brings to a stage, or ends there."""
        if isinstance(command, Enter | Abort):
            self.left(stage, command.request_id)
        match command:
            case Enter(sources=sources) | Extend(source=sources) if sources:
                given = sources if isinstance(sources, tuple) else (sources,)
                names = [each.stage for each in given]
                request = self._request(command.request_id)
                ends = [request.ended_s[name] for name in names if name in request.ended_s]
                # Something that was paused meanwhile ended later than the chunk that is sent.
                start_s = max(ends, default=time.monotonic())
                sent = _Sent(start_s, " + ".join(names), num_tensor_bytes(given))
                request.sent.setdefault(stage, deque()).append(sent)
                request.given.setdefault(stage, []).append(sent)

    def left(self, stage: str, request_id: str) -> None:
        """Take note that a stage has a request no more: nothing is on its way to it there."""
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
            written = self._written(event, offset, until_us.get(process, 0.0))
            until_us[process] = round(written["ts"] + written.get("dur", 0.0), 3)
            self._write(written | {"pid": process, "tid": track})

    def close(self) -> None:
        """End the file and move it to its place. May be called again.

        Raises:
            TraceError: it could not be written; what was written is left under its other name.
        """
        if not self._file.closed:
            self._unwritten += b"\n]\n"
            self._flush()
            try:
                self._file.close()
                if self.error is None:
                    os.replace(self._aside, self.path)
            except OSError as error:
                self.error = self.error or error
        if self.error is not None:
            reason = self.error.strerror
            raise TraceError(self.error.errno, reason, str(self._aside)) from self.error

    def discard(self) -> None:
        """Leave nothing: there was no run."""
        self._file.close()
        self._aside.unlink(missing_ok=True)

    def _offset(self, traced: Traced) -> float:
        """What to add to a worker's times to compare them with this machine's.

        Of clocks elsewhere the difference is known as well as a message is fast: it takes some
        time, so that the smallest difference seen is the nearest.
        """
        if traced.clock == this_clock():
            return 0.0
        seen = time.monotonic() - traced.told_s
        self._offsets[traced.clock] = min(self._offsets.get(traced.clock, seen), seen)
        return self._offsets[traced.clock]

    def _note(self, stage: str, process: int, event: StageEvent, offset: float) -> None:
        """Keep when a request's last piece of time ended, and tell of what has arrived."""
        assert event.request_id is not None
        request = self._request(event.request_id)
        if event.name == RUN_AGAIN:
            again = [replace(each, start_s=event.start_s) for each in request.given.get(stage, ())]
            request.sent[stage] = deque(again)
        if event.name in _RECEIPTS and (on_way := request.sent.get(stage)):
            sent = on_way.popleft()
            for each in self._transfer(sent, process, event, offset):
                self._write(each)
        if event.end_s is not None and event.name == "step":
            request.ended_s[stage] = event.end_s + offset

    def _transfer(
        self, sent: _Sent, process: int, event: StageEvent, offset: float
    ) -> Iterator[dict[str, Any]]:
        """Transfers overlap with what a stage does meanwhile, so they stand beside the tracks."""
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

    def _written(self, event: StageEvent, offset: float, until_us: float) -> dict[str, Any]:
        """An event on its track, which it does not reach back on: clocks may be off a little."""
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
        """Microseconds since the trace began; what began before it begins with it."""
        return round(max(time_s - self._start_s, 0.0) * 1e6, 3)

    def _process(self, stage: str, replica: int) -> int:
        """The number of a worker's process, which is named when it is first needed."""
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
            if len(self._requests) > _MOST_REQUESTS:
                self._requests.popitem(last=False)
        else:
            self._requests.move_to_end(request_id)
        return request

    def _track(self, request_id: str, process: int) -> int:
        """The number of a request's track in a process, where it is named when first needed."""
        request = self._request(request_id)
        if process not in request.named:
            request.named.add(process)
            self._describe("thread_name", process, request.track, name=request_id)
            order = request.track - _BELOW_REQUESTS
            self._describe("thread_sort_index", process, request.track, sort_index=order)
        return request.track

    def _describe(self, what: str, process: int, track: int, **args: str | int) -> None:
        self._write({"name": what, "ph": "M", "pid": process, "tid": track, "args": args})

    def _write(self, event: Mapping[str, Any]) -> None:
        self._unwritten += (self._separator + json.dumps(event, separators=(",", ":"))).encode()
        self._separator = ",\n"
        now_s = time.monotonic()
        if len(self._unwritten) >= _MOST_UNWRITTEN or now_s - self._written_s >= _WRITTEN_AFTER_S:
            self._written_s = now_s
            self._flush()

    def _flush(self) -> None:
        """Write what has come; a full disk ends the trace and nothing else."""
        left, self._unwritten = memoryview(self._unwritten), bytearray()
        if self.error is not None or self._file.closed:
            return
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError as error:
            self.error = error
