"""Steps of an engine that fail on purpose, at any point."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from engine import LLMEngine
from engine.requests.request import RequestStatus
from engine.scheduling.scheduler import SchedulerOutput

__all__ = ["POINTS", "Faults"]

POINTS = ("prepared", "computed", "sampled", "written")
"""How far a step gets: nothing computed yet; keys and values written; a token chosen; rows
written as well."""


class Faults:
    """Lets an engine's steps of several requests fail as planned; steps of one go through.

    Args:
        engine: used for nothing else.

    Attributes:
        count: steps that failed.
        batches: ids of the requests of every step, failed ones included.
        num_isolated_steps: steps in which an isolated request ran.
        violations: steps that an isolated request shared, or was swapped out in.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.count = 0
        self.batches: list[tuple[str, ...]] = []
        self.num_isolated_steps = 0
        self.violations: list[str] = []
        self._plan: Iterator[str | None] = iter(())
        self._point: str | None = None
        runner = engine._runner
        self._wrap_execute(runner)
        self._wrap(runner, "_forward", "prepared", "computed")
        self._wrap(runner, "_sample", None, "sampled")
        self._wrap(runner, "_write_outputs", None, "written")

    def plan(self, points: Iterable[str | None]) -> None:
        """Where the next steps of several requests fail, one each; None for nowhere."""
        self._plan = iter(points)

    def _wrap_execute(self, runner: Any) -> None:
        plain = runner.execute

        def execute(output: SchedulerOutput) -> Any:
            self._note(output)
            self._point = next(self._plan, None) if len(output.scheduled) > 1 else None
            return plain(output)

        runner.execute = execute

    def _note(self, output: SchedulerOutput) -> None:
        running = [item.request for item in output.scheduled]
        self.batches.append(tuple(request.request_id for request in running))
        has_isolated = any(request.is_isolated for request in running)
        self.num_isolated_steps += has_isolated
        if len(running) > 1 and has_isolated:
            self.violations.append(f"step {len(self.batches)} is shared: {self.batches[-1]}")
        swapped = [r.request_id for r in output.preempted if r.status is RequestStatus.SWAPPED]
        isolated = [r.request_id for r in output.preempted if r.is_isolated]
        if set(swapped) & set(isolated):
            self.violations.append(f"step {len(self.batches)} swaps an isolated request: {swapped}")

    def _wrap(self, runner: Any, name: str, before: str | None, after: str) -> None:
        plain = getattr(runner, name)

        def wrapped(*arguments: Any) -> Any:
            self._fall(before)
            result = plain(*arguments)
            self._fall(after)
            return result

        setattr(runner, name, wrapped)

    def _fall(self, point: str | None) -> None:
        if point is not None and point == self._point:
            self._point = None
            self.count += 1
            raise RuntimeError(f"a fault on purpose, {point}")
