"""How a worker that runs elsewhere is doing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["WorkerState", "why_lost"]


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


def why_lost(workers: Sequence[WorkerState]) -> str | None:
    """Why a stage takes no requests, in words that follow its name.

    Args:
        workers: of the stage, by replica.

    Returns:
        None if any of them takes requests, or will without anybody's help.
    """
    if any(worker.state in ("up", "starting") for worker in workers):
        return None
    waits = "it takes no requests until there is a place for it"
    for worker in workers:
        if worker.state == "waiting":
            return f"{waits}: its worker {worker.last_end}"
    return f"it cannot be used any more: its worker {workers[0].last_end}"
