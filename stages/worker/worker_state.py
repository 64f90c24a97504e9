"""How a worker that runs elsewhere is doing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["WorkerState"]


@dataclass(frozen=True, slots=True)
class WorkerState:
    """How one replica of a stage is doing, and what became of the workers that it had before.

    Attributes:
        state: ``up`` takes requests; ``starting`` will; ``waiting`` will when the cluster has a
            place for it again; ``down`` never will again.
        num_restarts: workers that were started in the place of one that had ended.
        last_end: what the last one of those died of, such as ``"was killed by SIGKILL"``.
        ended_at: when, in seconds since 1970.
    """

    state: Literal["up", "starting", "waiting", "down"]
    num_restarts: int = 0
    last_end: str | None = None
    ended_at: float | None = None
