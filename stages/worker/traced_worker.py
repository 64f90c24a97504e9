"""A worker that tells what it did when, too."""

from __future__ import annotations

import time
from collections.abc import Sequence

from stages.stage import Stage, Transform
from stages.trace_events import Traced, this_clock
from stages.worker.messages import Command, StreamedEdge
from stages.worker.stage_tracer import StageTracer
from stages.worker.stage_worker import StageWorker

__all__ = ["TracedWorker"]

_MOST_EVENTS = 1_000
"""Kept while there is no other news."""


class TracedWorker(StageWorker):
    """Runs a stage as a :class:`StageWorker` does, and tells of it ahead of its news.

    Args:
        stage, transform, edges: see there.
        replica: which of the stage's workers it is.
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
        self._tracer = StageTracer(stage)

    def send(self, command: Command) -> None:
        """See :class:`StageWorker`."""
        start_s, num_news = time.monotonic(), len(self._news)
        super().send(command)
        end_s = time.monotonic()
        stay = self._stays.get(command.request_id)
        self._tracer.commanded(command, start_s, end_s, stay)
        self._tracer.note_failures(self._news[num_news:], end_s)

    def work(self) -> None:
        """See :class:`StageWorker`."""
        start_s, num_news = time.monotonic(), len(self._news)
        super().work()
        news = self._news[num_news:]
        self._tracer.worked(start_s, time.monotonic(), news, self._stays)

    def drop_all(self) -> None:
        """See :class:`~stages.worker.stage_link.StageLink`."""
        super().drop_all()
        self._tracer = StageTracer(self.stage)

    def traces(self) -> list[Traced]:
        """See :class:`~stages.worker.stage_link.StageLink`; kept until there is other news."""
        if not self._news and self._tracer.num_events < _MOST_EVENTS:
            return []
        events = self._tracer.take()
        if not events:
            return []
        return [Traced(events, self._replica, this_clock(), time.monotonic())]
