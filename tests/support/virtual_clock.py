"""A clock that shows what a test wants: nothing really waits, and all times are exact."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Coroutine
from itertools import count
from typing import Any, TypeVar

from omni.commands.bench.clock import Clock

__all__ = ["VirtualClock"]

_T = TypeVar("_T")
_TURNS = 10
"""Of the event loop, in which whatever can go on without waiting does."""


class VirtualClock(Clock):
    """Jumps to the next time that anybody waits for, as soon as nobody can do anything else."""

    def __init__(self) -> None:
        self.time = 100.0
        self.lateness = 0.0
        self._numbers = count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self.time

    def cpu(self) -> float:
        return self.time / 2

    async def sleep_until(self, moment: float) -> None:
        """Those who wait are woken ``lateness`` too late, as a busy event loop would."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (moment + self.lateness, next(self._numbers), woken))
        await woken

    async def sleep(self, seconds: float) -> None:
        """Sleep so long, always woken in time."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.time + seconds, next(self._numbers), woken))
        await woken

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine to its end."""
        return asyncio.run(self._run(work))

    async def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        task = asyncio.ensure_future(work)
        while True:
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            if task.done():
                return await task
            assert self._sleepers, "everybody waits, and nobody for the time"
            moment, _, woken = heapq.heappop(self._sleepers)
            self.time = max(self.time, moment)
            if not woken.cancelled():
                woken.set_result(None)
