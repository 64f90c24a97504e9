"""What the workers of one life after another have counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stages.stage import StageStats

__all__ = ["StageCounts", "WorkerCounts"]


class StageCounts:
    """Of one stage: sums that go on when a worker ends and the next one counts from nothing. ::

        workers that ended:  sums of what each told last
        the one that is up:  what it told last, its requests of now with it

    Not safe for several threads at once: its owner holds a lock.
    """

    def __init__(self) -> None:
        self._ended = StageStats()
        self._latest: StageStats | None = None

    @property
    def total(self) -> StageStats:
        """Of all of them."""
        return (self._latest or StageStats()).following(self._ended)

    def hear(self, stats: StageStats) -> None:
        """The worker that is up has told its counts, one sign of life after another."""
        self._latest = stats

    def hear_answer(self, stats: StageStats) -> None:
        """The same, asked for: a reading never goes back behind one that was told before."""
        if self._latest is None or self._latest.num_steps <= stats.num_steps:
            self._latest = stats

    def end(self, *, num_restarts: int) -> None:
        """The worker has ended, and so many are started in its place."""
        if self._latest is not None:
            self._ended, self._latest = self._latest.following(self._ended), None
        self._ended = self._ended.plus(num_restarts=num_restarts)


class WorkerCounts:
    """The same of all stages that a worker runs.

    Args:
        stages: their names.
    """

    def __init__(self, stages: Iterable[str]) -> None:
        self._of = {name: StageCounts() for name in stages}

    @property
    def total(self) -> Mapping[str, StageStats]:
        """By stage."""
        return {name: each.total for name, each in self._of.items()}

    def hear(self, stats: Mapping[str, StageStats]) -> None:
        """See :meth:`StageCounts.hear`."""
        for name, each in stats.items():
            self._of[name].hear(each)

    def hear_answer(self, stats: Mapping[str, StageStats]) -> None:
        """See :meth:`StageCounts.hear_answer`."""
        for name, each in stats.items():
            self._of[name].hear_answer(each)

    def end(self, *, num_restarts: int) -> None:
        """See :meth:`StageCounts.end`."""
        for each in self._of.values():
            each.end(num_restarts=num_restarts)
