"""Turns are taken by priority and then by arrival; the queue is bounded."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest

from omni.server.serving.admission import Admission, Place
from omni.server.serving.api_error import ApiError


def has_turn(place: Place) -> bool:
    return place.granted.done() and not place.granted.cancelled()


def test_turns_go_by_priority_and_then_by_arrival():
    async def run() -> None:
        admission = Admission(1, 8)
        (first,) = admission.take([5])
        places = [admission.take([priority])[0] for priority in (1, 0, 1, -1, 0)]
        order = []
        admission.leave(first)
        for _ in places:
            (now,) = (place for place in places if has_turn(place) and not place.is_over)
            order.append(places.index(now))
            admission.leave(now)
        assert order == [3, 1, 4, 0, 2]
        assert (admission.num_running, admission.num_waiting) == (0, 0)

    asyncio.run(run())


def test_requests_that_belong_together_wait_as_one_and_all_get_a_place_or_none():
    async def run() -> None:
        admission = Admission(2, 2)
        first = admission.take([0, 0, 0])
        assert [has_turn(place) for place in first] == [True, True, False]
        second = admission.take([0] * 100)
        assert (admission.num_running, admission.num_waiting) == (2, 2)
        with pytest.raises(ApiError) as error:
            admission.take([0])
        assert error.value.status == 429 and error.value.headers["Retry-After"]
        for place in first:
            admission.leave(place)
        assert (admission.num_running, admission.num_waiting) == (2, 1)
        for place in second:
            admission.leave(place)
        assert (admission.num_running, admission.num_waiting) == (0, 0)

    asyncio.run(run())


def test_who_gives_up_waiting_makes_room_and_is_passed_over():
    async def run() -> None:
        admission = Admission(1, 1)
        (running,), (waiting,) = admission.take([0]), admission.take([0])
        admission.leave(waiting)
        admission.leave(waiting)
        (next_one,) = admission.take([0])
        admission.leave(running)
        assert has_turn(next_one) and waiting.granted.cancelled()

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_no_place_is_lost(seed: int):
    async def run() -> None:
        draw = random.Random(seed)
        admission = Admission(draw.randint(1, 4), draw.randint(0, 6))
        places: list[Place] = []
        for _ in range(300):
            if draw.random() < 0.6:
                with suppress(ApiError):
                    places += admission.take([draw.randint(0, 2)] * draw.randint(1, 3))
            elif places:
                admission.leave(places.pop(draw.randrange(len(places))))
            waiting = [place for place in places if not has_turn(place)]
            assert admission.num_running == len(places) - len(waiting) <= admission.max_running
            assert admission.num_waiting == len({id(place.group) for place in waiting})
            assert admission.num_running == admission.max_running or not waiting
        for place in places:
            admission.leave(place)
        assert (admission.num_running, admission.num_waiting) == (0, 0)

    asyncio.run(run())
