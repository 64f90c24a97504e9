"""Turns are taken by priority and then by arrival; the queue is bounded."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest

from omni.server.serving.api_error import ApiError
from omni.server.serving.turn_queue import QueuePlace, TurnQueue


def has_turn(place: QueuePlace) -> bool:
    return place.granted.done() and not place.granted.cancelled()


def test_turns_go_by_priority_and_then_by_arrival():
    async def run() -> None:
        queue = TurnQueue(1, 8)
        (first,) = queue.take([5])
        places = [queue.take([priority])[0] for priority in (1, 0, 1, -1, 0)]
        order = []
        queue.leave(first)
        for _ in places:
            (now,) = (place for place in places if has_turn(place) and not place.is_over)
            order.append(places.index(now))
            queue.leave(now)
        assert order == [3, 1, 4, 0, 2]
        assert (queue.num_running, queue.num_waiting) == (0, 0)

    asyncio.run(run())


def test_requests_that_belong_together_wait_as_one_and_all_get_a_place_or_none():
    async def run() -> None:
        queue = TurnQueue(2, 2)
        first = queue.take([0, 0, 0])
        assert [has_turn(place) for place in first] == [True, True, False]
        second = queue.take([0] * 100)
        assert (queue.num_running, queue.num_waiting) == (2, 2)
        with pytest.raises(ApiError) as error:
            queue.take([0])
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
        queue = TurnQueue(1, 1)
        (running,), (waiting,) = queue.take([0]), queue.take([0])
        queue.leave(waiting)
        queue.leave(waiting)
        (next_one,) = queue.take([0])
        queue.leave(running)
        assert has_turn(next_one) and waiting.granted.cancelled()

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_no_place_is_lost(seed: int):
    async def run() -> None:
        draw = random.Random(seed)
        queue = TurnQueue(draw.randint(1, 4), draw.randint(0, 6))
        places: list[QueuePlace] = []
        for _ in range(300):
            if draw.random() < 0.6:
                with suppress(ApiError):
                    places += queue.take([draw.randint(0, 2)] * draw.randint(1, 3))
            elif places:
                queue.leave(places.pop(draw.randrange(len(places))))
            waiting = [place for place in places if not has_turn(place)]
            assert queue.num_running == len(places) - len(waiting) <= queue.max_running
            assert queue.num_waiting == len({id(place.group) for place in waiting})
            assert queue.num_running == queue.max_running or not waiting
        for place in places:
            queue.leave(place)
        assert (queue.num_running, queue.num_waiting) == (0, 0)

    asyncio.run(run())
