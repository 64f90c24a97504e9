"""Whose turn it is, and how many may wait for theirs."""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import count

from omni.server.serving.api_error import ApiError

__all__ = ["QueuePlace", "TurnQueue"]

_LONGEST_RETRY_S = 60
_SMOOTHING = 0.2
"""Weight of the newest request in the mean time that a request takes."""


@dataclass(slots=True)
class _Group:
    """Requests that came together: they wait as one."""

    num_waiting: int = 0


@dataclass(order=True, slots=True)
class QueuePlace:
    """One request's place: first in the queue, then among those that run.

    Attributes:
        priority: lower comes first.
        number: of arrival.
        granted: done when it is its turn.
        group: those that came with it.
        began: when that was, by the monotonic clock.
    """

    priority: int
    number: int
    granted: asyncio.Future[None] = field(compare=False)
    group: _Group = field(compare=False)
    began: float | None = field(default=None, compare=False)
    is_over: bool = field(default=False, compare=False)

    async def turn(self) -> None:
        """Wait until the request may run."""
        await self.granted


class TurnQueue:
    """Lets so many requests run at once, and so many more wait, by priority and then by arrival.

    For one event loop.

    Args:
        max_running: that run at once.
        max_waiting: that wait; of requests that came together, several count for one.

    Attributes:
        max_running: as given.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.max_running = max_running
        self._max_waiting = max_waiting
        self._waiting: list[QueuePlace] = []
        self._num_waiting = 0
        self._num_running = 0
        self._numbers = count()
        self._mean_s = 1.0

    @property
    def num_running(self) -> int:
        """Requests that have had their turn and are not over."""
        return self._num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return self._num_waiting

    def take(self, priorities: list[int]) -> list[QueuePlace]:
        """Take a place for each of some requests that belong together: for all, or for none.

        Raises:
            ApiError: with status 429: too many wait.
        """
        self.check_room(len(priorities))
        loop, group = asyncio.get_running_loop(), _Group(len(priorities))
        places = [
            QueuePlace(each, next(self._numbers), loop.create_future(), group)
            for each in priorities
        ]
        for place in places:
            heapq.heappush(self._waiting, place)
        self._num_waiting += 1
        self._grant()
        return places

    def check_room(self, num_requests: int = 1) -> None:
        """Check that so many requests that belong together would get their places now.

        Raises:
            ApiError: with status 429: too many wait.
        """
        free = self.max_running - self._num_running if not self._num_waiting else 0
        if num_requests > free and self._num_waiting >= self._max_waiting:
            raise self._full()

    def leave(self, place: QueuePlace) -> None:
        """Give a place up, wherever the request is. May be called again."""
        if place.is_over:
            return
        place.is_over = True
        if place.began is None:
            self._no_longer_waits(place)
            place.granted.cancel()
        else:
            self._num_running -= 1
            took = time.monotonic() - place.began
            self._mean_s += _SMOOTHING * (took - self._mean_s)
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._waiting[0].is_over:
            heapq.heappop(self._waiting)
        while self._waiting and self._num_running < self.max_running:
            place = heapq.heappop(self._waiting)
            if place.is_over:
                continue
            self._no_longer_waits(place)
            self._num_running += 1
            place.began = time.monotonic()
            place.granted.set_result(None)

    def _no_longer_waits(self, place: QueuePlace) -> None:
        place.group.num_waiting -= 1
        self._num_waiting -= not place.group.num_waiting

    def _full(self) -> ApiError:
        ahead = self._num_waiting + self._num_running
        seconds = min(_LONGEST_RETRY_S, math.ceil(self._mean_s * ahead / self.max_running))
        return ApiError(
            HTTPStatus.TOO_MANY_REQUESTS,
            f"{self._num_running} requests run and {self._num_waiting} wait, of at most "
            f"{self.max_running} and {self._max_waiting}; try again in {max(1, seconds)} s",
            code="queue_full",
            headers={"Retry-After": str(max(1, seconds))},
        )
