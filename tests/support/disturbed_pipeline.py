"""Runs of a pipeline whose driver is interrupted at one line, and their outcomes."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from omni import Omni, OmniOutput, OmniRequest
from omni.pipelines.pipeline import Pipeline
from stages import Stage
from tests.support.disturbed_run import Outcome
from tests.support.line_faults import Event, LineFault
from tests.support.same_outputs import assert_same

WAYS = ("stream", "async", "abort", "leave")
"""How requests are run: through two of the callers' interfaces, with one or all of them aborted."""
FOLDERS = ("omni/runtime", "stages/worker")

Outputs: TypeAlias = Mapping[str, Sequence[OmniOutput]]
"""All outputs of each request, in order."""


@dataclass(frozen=True)
class Place:
    """A line that the driver executes.

    Attributes:
        way: one of :data:`WAYS`.
        line: the line.
        nth: the iteration of the driver's loop.
    """

    way: str
    line: Event
    nth: int


class _AimedFault(LineFault):
    """A fault in a running thread, aimed at a line while the thread runs."""

    def aim(self, at: Event | None, nth: int) -> None:
        self._at, self._nth = at, nth
        self.place, self.num_events, self.events = None, 0, []

    def trace_again(self) -> None:
        """Resume tracing after a fault ended no thread: Python stops it when a tracer raises."""
        if sys.gettrace() is None:
            sys.settrace(self._call)
            frame = sys._getframe().f_back
            while frame is not None:
                frame.f_trace = self._call(frame, "call", None)
                frame = frame.f_back


class DisturbedPipeline:
    """A pipeline that runs the same requests repeatedly while its driver is interrupted.

    Args:
        build: builds its stages.
        prompts: one for each request, by id.
        patience_s: timeout after which a run counts as hanging.
        traces: a folder for traces; None writes none.
    """

    def __init__(
        self,
        build: Callable[[], Sequence[Stage]],
        prompts: Mapping[str, str],
        patience_s: float = 60.0,
        traces: Path | None = None,
    ) -> None:
        self._build, self._prompts, self._patience_s = build, prompts, patience_s
        self._traces, self._num_opened = traces, 0
        self.open()
        self._expected = self._asked("stream")

    def open(self) -> None:
        """Build the pipeline, replacing one that cannot continue."""
        self.stages = self._build()
        for stage in self.stages:
            stage.rebuild = partial(_forget, stage)  # type: ignore[method-assign]
        self._num_opened += 1
        trace = None if self._traces is None else self._traces / f"{self._num_opened}.json"
        self.omni = Omni(Pipeline(self.stages), trace=trace)
        self._fault = _AimedFault(-1, MemoryError, folders=FOLDERS)
        self._rest()
        driver = self.omni._driver
        run, wait = driver._run, driver._wait_for_work

        def traced() -> None:
            with self._fault:
                run()

        def turned() -> bool:
            self._fault.trace_again()
            return wait()

        driver._run = traced  # type: ignore[method-assign]
        driver._wait_for_work = turned  # type: ignore[method-assign]

    def places(self, repeats: int, draw: random.Random) -> list[Place]:
        """Return every line that the driver executes, in up to ``repeats`` iterations each."""
        found: dict[Event, list[Place]] = {}
        for way in WAYS:
            self._fault.aim(None, -1)
            self._asked(way)
            counted = Counter(self._fault.events)
            self._rest()
            for line, count in counted.items():
                # Not the last iterations: another run may have fewer.
                turns = range((count + 1) // 2)
                found.setdefault(line, []).extend(Place(way, line, nth) for nth in turns)
        return [
            place
            for places in found.values()
            for place in draw.sample(places, min(repeats, len(places)))
        ]

    def run(self, place: Place) -> Outcome:
        """Run, interrupt the driver, run all again, and check that the stages hold nothing."""
        self._fault.aim(place.line, place.nth)
        where = None
        try:
            outputs = self._asked(place.way)
            where = self._fault.place
            self._rest()
            kind = self._judge(outputs, place.way)
            self._in_time(self._check_idle)
            again = self._asked("stream")
            if self._judge(again, "stream") != "went on":
                return Outcome("wrong", where, f"asked again: {_errors(again)}")
            self._in_time(self._check_idle)
        except TimeoutError as error:
            return Outcome("hangs", where or self._fault.place, str(error))
        except AssertionError as error:
            return Outcome("wrong", where, str(error)[:300])
        except Exception as error:
            return Outcome("silently broken", where, f"{type(error).__name__}: {error}"[:300])
        return Outcome(kind, where)

    def _rest(self) -> None:
        self._fault.aim(None, 2**60)

    def _judge(self, outputs: Outputs, way: str) -> str:
        """Classify the outputs: every one is right, or reports the interruption."""
        kind = "went on"
        for request_id in self._prompts:
            found = outputs.get(request_id, ())
            if way == "leave" or (way == "abort" and found and found[-1].error == "aborted"):
                continue
            assert found and found[-1].finished, f"{request_id} is lost"
            if (error := found[-1].error) is not None:
                assert "a fault on purpose" in error, error
                kind = "failed alone"
                continue
            assert_same([found[-1]], [self._expected[request_id][-1]])
            for name, stage in found[-1].stages.items():
                deltas = [each.stages[name].delta for each in found if name in each.stages]
                assert "".join(deltas) == (stage.text or ""), (request_id, deltas)
        return kind

    def _check_idle(self) -> None:
        """Check that no stage holds anything, unless it will be rebuilt on its next use."""
        links: Any = self.omni._driver._orchestrator._links
        with self.omni.paused():
            for stage in self.stages:
                worker = links[stage.name]
                if worker._guarded._broken.is_broken:
                    continue
                assert not stage.has_unfinished_requests, f"{stage.name} holds requests"
                stage.check_integrity()

    def _asked(self, way: str) -> Outputs:
        """Return all outputs, if they arrive in time."""
        found: dict[str, list[OmniOutput]] = {}
        self._in_time(lambda: self._ask(way, found))
        return found

    def _in_time(self, work: Callable[[], None]) -> None:
        """Run work that may hang.

        Raises:
            TimeoutError: it did hang.
        """
        errors: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self._patience_s)
        if thread.is_alive():
            raise TimeoutError(f"nothing came for {self._patience_s} s")
        if errors:
            raise errors[0]

    def _ask(self, way: str, found: dict[str, list[OmniOutput]]) -> None:
        requests = [OmniRequest(prompt, name) for name, prompt in self._prompts.items()]

        def take(output: OmniOutput) -> None:
            found.setdefault(output.request_id, []).append(output)

        if way == "async":
            asyncio.run(self.omni.agenerate(requests, on_progress=take))
            return
        for output in self.omni.stream(requests):
            take(output)
            if way == "leave" and output.stages:
                return
            if way == "abort" and sum(map(len, found.values())) == 1:
                self.omni.abort(output.request_id)


def _forget(stage: Stage) -> None:
    """Rebuild a stage that has no model."""
    for name in [*stage.live]:  # type: ignore[attr-defined]
        stage.abort(name)


def _errors(outputs: Outputs) -> list[str | None]:
    return [found[-1].error for found in outputs.values()]
