"""A stage that runs elsewhere, as its pipeline knows it."""

from __future__ import annotations

from abc import abstractmethod

from stages.stage import Stage
from stages.worker.worker_state import WorkerState

__all__ = ["DistantStage"]


class DistantStage(Stage):
    """A stage that workers run.

    It answers what a stage is asked between requests (its facts, counters and settings);
    ``add_request`` and ``step`` are its worker's.
    """

    @abstractmethod
    def worker_states(self) -> tuple[WorkerState, ...]:
        """How its workers are doing, by replica; waits for none of them."""
