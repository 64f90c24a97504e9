"""Turns are taken by priority and then by arrival; the queue is bounded."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest

from omni.server.serving.admission_queue import AdmissionQueue, QueuePlace
from omni.server.serving.api_error import ApiError


def is_admitted(place: QueuePlace) -> bool:
    return place.admitted.done() and not place.admitted.cancelled()


def test_turns_go_by_priority_and_then_by_arrival():
    async def run() -> None:
        queue = AdmissionQueue(1, 8)
        (first,) = queue.enter([5])
        places = [queue.enter([priority])[0] for priority in (1, 0, 1, -1, 0)]
        order = []
        queue.leave(first)
        for _ in places:
            (now,) = (place for place in places if is_admitted(place) and not place.is_left)
            order.append(places.index(now))
            queue.leave(now)
        assert order == [3, 1, 4, 0, 2]
        assert (queue.num_running, queue.num_waiting) == (0, 0)

    asyncio.run(run())


def test_requests_that_belong_together_wait_as_one_and_all_get_a_place_or_none():
    async def run() -> None:
        queue = AdmissionQueue(2, 2)
        first = queue.enter([0, 0, 0])
        assert [is_admitted(place) for place in first] == [True, True, False]
        second = queue.enter([0] * 100)
        assert (queue.num_running, queue.num_waiting) == (2, 2)
        with pytest.raises(ApiError) as error:
            queue.enter([0])
        assert error.value.status == 429 and error.value.headers["Retry-After"]
        for place in first:
            queue.leave(place)
        assert (queue.num_running, queue.num_waiting) == (2, 1)
        for place in second:
            queue.leave(place)
        assert (queue.num_running, queue.num_waiting) == (0, 0)

    asyncio.run(run())


def test_who_gives_up_waiting_makes_room_and_is_passed_over():
    async def run() -> None:
        queue = AdmissionQueue(1, 1)
        (running,), (waiting,) = queue.enter([0]), queue.enter([0])
        queue.leave(waiting)
        queue.leave(waiting)
        (next_one,) = queue.enter([0])
        queue.leave(running)
        assert is_admitted(next_one) and waiting.admitted.cancelled()

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_no_place_is_lost(seed: int):
    async def run() -> None:
        draw = random.Random(seed)
        queue = AdmissionQueue(draw.randint(1, 4), draw.randint(0, 6))
        places: list[QueuePlace] = []
        for _ in range(300):
            if draw.random() < 0.6:
                with suppress(ApiError):
                    places += queue.enter([draw.randint(0, 2)] * draw.randint(1, 3))
            elif places:
                queue.leave(places.pop(draw.randrange(len(places))))
            waiting = [place for place in places if not is_admitted(place)]
            assert queue.num_running == len(places) - len(waiting) <= queue.max_running
            assert queue.num_waiting == len({id(place.group) for place in waiting})
            assert queue.num_running == queue.max_running or not waiting
        for place in places:
            queue.leave(place)
        assert (queue.num_running, queue.num_waiting) == (0, 0)

    asyncio.run(run())
