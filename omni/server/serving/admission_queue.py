"""Admission control of HTTP requests: limits of running and waiting requests."""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from dataclasses import dataclass, field
from itertools import count

from omni.server.serving.api_error import ApiError

_MAX_RETRY_S = 60
_SMOOTHING = 0.2
"""Weight of the newest request in the moving average of request durations."""


@dataclass(order=True, slots=True)
class QueuePlace:
    """One request's place in the queue, and then among the running requests.

    ``number`` is the order of arrival. ``admitted`` is resolved on admission, at ``began_s`` of the
    monotonic clock. A group of requests that arrive together counts as one while waiting;
    ``waiting`` has the numbers of those in the group that still wait.
    """

    priority: int
    number: int
    admitted: asyncio.Future[None] = field(compare=False)
    waiting: set[int] = field(compare=False)
    began_s: float | None = field(default=None, compare=False)
    has_left: bool = field(default=False, compare=False)


class AdmissionQueue:
    """Admits waiting requests by priority, then by arrival. Not thread-safe: for one event loop.

    At most ``max_running`` requests run concurrently, and at most ``max_waiting`` groups of
    requests wait; ``num_running`` and ``num_waiting`` are the current numbers.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.max_running = max_running
        self.num_running = 0
        self.num_waiting = 0
        self._max_waiting = max_waiting
        self._waiting: list[QueuePlace] = []
        self._numbers = count()
        self._mean_s = 1.0

    def enter(self, priorities: list[int]) -> list[QueuePlace]:
        """Enqueue a group of requests, all or none, and return their places."""
        self.check_room(len(priorities))
        loop, waiting = asyncio.get_running_loop(), set[int]()
        places = [
            QueuePlace(each, next(self._numbers), loop.create_future(), waiting)
            for each in priorities
        ]
        for place in places:
            waiting.add(place.number)
            heapq.heappush(self._waiting, place)
        self.num_waiting += 1
        self._admit()
        return places

    def check_room(self, num_requests: int = 1) -> None:
        """Refuse a group of this many requests with status 429 if there is no room now."""
        free = self.max_running - self.num_running if not self.num_waiting else 0
        if num_requests <= free or self.num_waiting < self._max_waiting:
            return
        ahead = self.num_waiting + self.num_running
        seconds = min(max(1, math.ceil(self._mean_s * ahead / self.max_running)), _MAX_RETRY_S)
        raise ApiError.too_many(
            f"{self.num_running} requests run and {self.num_waiting} wait, of at most "
            f"{self.max_running} and {self._max_waiting}; try again in {seconds} s",
            "queue_full",
            seconds,
        )

    def leave(self, place: QueuePlace) -> None:
        """Free the place of a waiting or running request. Idempotent."""
        if place.has_left:
            return
        place.has_left = True
        if place.began_s is None:
            self._remove_waiting(place)
            place.admitted.cancel()
        else:
            self.num_running -= 1
            took_s = time.monotonic() - place.began_s
            self._mean_s += _SMOOTHING * (took_s - self._mean_s)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and (self._waiting[0].has_left or self.num_running < self.max_running):
            place = heapq.heappop(self._waiting)
            if place.has_left:
                continue
            self._remove_waiting(place)
            self.num_running += 1
            place.began_s = time.monotonic()
            place.admitted.set_result(None)

    def _remove_waiting(self, place: QueuePlace) -> None:
        place.waiting.remove(place.number)
        self.num_waiting -= not place.waiting
