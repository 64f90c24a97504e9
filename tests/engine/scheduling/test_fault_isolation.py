"""After a step that failed its requests run alone, in order, and no longer than they must."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.requests.request import Request, RequestStatus
from tests.support.examples import examples
from tests.support.scheduler_harness import Harness, ids


def begun(harness: Harness, requests: list[Request]) -> list[str]:
    """Run to the end; the names in the order in which they first ran since."""
    order: list[str] = []
    for _ in range(500):
        order += [name for name in harness.shares() if name not in order]
        if all(request.status is RequestStatus.FINISHED for request in requests):
            return order
    raise AssertionError(f"{requests} never end; {order} began")


def isolate(harness: Harness, name: str, start: int, length: int, *, priority: int = 0) -> Request:
    """A request that has not begun, and whose whole prompt was in a step that failed."""
    request = harness.add(name, ids(start, length), priority=priority)
    harness.scheduler.fault_isolation.isolate(request, length)
    return request


def test_each_runs_alone_until_it_is_past_the_step_and_then_all_together() -> None:
    harness = Harness(budget=10)
    for number, length in enumerate([3, 2, 8]):
        harness.add(str(number), ids(100 * number, length))
    assert {item.request.request_id: item.num_tokens for item in harness.fail().scheduled} == {
        "0": 3,
        "1": 2,
        "2": 5,
    }
    assert harness.shares() == {"0": 3}
    assert harness.shares() == {"0": 1}, "the cleared one's turn"
    assert harness.shares() == {"1": 2}
    assert harness.shares() == {"0": 1, "1": 1}
    assert harness.shares() == {"2": 8}
    assert harness.shares() == {"0": 1, "1": 1, "2": 1}


def test_the_first_in_the_order_has_the_first_step_even_if_another_has_begun() -> None:
    harness = Harness(budget=8)
    first = isolate(harness, "first", 0, 20)
    isolate(harness, "second", 100, 20, priority=1)
    harness.scheduler.pause(first)
    assert harness.shares() == {"second": 8}
    harness.scheduler.resume(first)
    assert [harness.shares() for _ in range(3)] == [{"first": 8}, {"first": 8}, {"first": 4}]


def test_isolated_requests_leave_the_seats_to_those_that_have_them() -> None:
    harness = Harness(seats=2)
    requests = [harness.add(name, ids(100 * n, 5)) for n, name in enumerate("ab")]
    harness.fail()
    requests += [
        harness.add(name, ids(900 + 100 * n, 5), priority=-1) for n, name in enumerate("cd")
    ]
    # The harness sees to it that there are never more than two.
    assert begun(harness, requests)[:2] == ["a", "c"]


def test_no_request_begins_before_an_isolated_one_that_was_there_first() -> None:
    harness = Harness(num_blocks=13)  # twelve to hold
    running = harness.add("running", ids(0, 16), max_tokens=9)
    harness.step()
    requests = [
        running,
        isolate(harness, "big", 100, 31),
        isolate(harness, "small", 200, 4),
        harness.add("later", ids(300, 4)),
    ]
    assert begun(harness, requests) == ["running", "big", "small", "later"]


def test_who_comes_later_passes_an_isolated_request_that_rests() -> None:
    harness = Harness()
    resting = isolate(harness, "resting", 100, 8)
    harness.scheduler.pause(resting)
    later = harness.add("later", ids(300, 4))
    assert begun(harness, [later]) == ["later"]
    harness.scheduler.resume(resting)
    assert begun(harness, [resting]) == ["resting"]


def test_an_isolated_request_that_makes_room_is_computed_again_and_not_swapped() -> None:
    harness = Harness(num_blocks=9, seats=2, budget=4, swaps=True)  # eight blocks to hold
    keeps = harness.add("keeps", ids(0, 8), max_tokens=16)
    harness.step()
    goes = isolate(harness, "goes", 100, 24)
    preempted = []
    while keeps.status is not RequestStatus.FINISHED:
        for request in harness.step().preempted:
            preempted.append((request.is_isolated, request.status))
    assert preempted == [(True, RequestStatus.WAITING)]
    assert begun(harness, [goes]) == ["goes"]


@settings(max_examples=examples(200))
@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 20), st.integers(1, 6), st.integers(0, 2)),
        min_size=1,
        max_size=8,
    ),
    failures=st.lists(st.booleans(), max_size=60),
    num_blocks=st.integers(8, 20),
    seats=st.integers(1, 4),
    budget=st.integers(4, 24),
    swaps=st.booleans(),
)
def test_every_request_finishes_whatever_steps_fail(
    prompts: list[tuple[int, int, int, int]],
    failures: list[bool],
    num_blocks: int,
    seats: int,
    budget: int,
    swaps: bool,
) -> None:
    harness = Harness(num_blocks=num_blocks, seats=seats, budget=budget, swaps=swaps)
    requests = [
        harness.add(str(i), ids(100 * family, length), max_tokens=max_tokens, priority=priority)
        for i, (family, length, max_tokens, priority) in enumerate(prompts)
    ]
    for fails in failures:
        if harness.scheduler.num_waiting or harness.scheduler.num_running:
            harness.fail() if fails else harness.step()
    begun(harness, [r for r in requests if r.status is not RequestStatus.FINISHED] or requests)
    assert all(request.num_tokens == request.max_num_tokens for request in requests)
    assert harness.kv.stats().held == 0
