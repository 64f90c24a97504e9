"""Who runs how many tokens: budgets, order, waiting, preemption. No model is needed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.requests.request import Request, RequestStatus
from prefix_cache import check_integrity as check_blocks
from tests.support.examples import examples
from tests.support.scheduler_harness import Harness, ids


def test_prompts_share_the_budget_and_the_last_is_chunked() -> None:
    harness = Harness(budget=10)
    for number, length in enumerate([3, 2, 8]):
        harness.add(str(number), ids(100 * number, length))
    assert harness.shares() == {"0": 3, "1": 2, "2": 5}
    assert harness.shares() == {"0": 1, "1": 1, "2": 3}


def test_a_long_prompt_leaves_a_token_for_each_request_behind_it() -> None:
    harness = Harness(budget=8)
    harness.add("short", ids(0, 3), max_tokens=9)
    harness.add("long", ids(100, 50), priority=-1)
    # The long one comes first in the order, yet the short one decodes in every step.
    assert harness.shares() == {"long": 8}
    assert harness.shares() == {"long": 8}
    later = Harness(budget=8)
    later.add("short", ids(0, 3), max_tokens=9)
    later.step()
    later.add("long", ids(100, 50), priority=-1)
    assert later.shares() == {"short": 1, "long": 7}
    assert later.shares() == {"short": 1, "long": 7}


def test_decodes_lead_the_batch() -> None:
    harness = Harness(budget=16)
    harness.add("late", ids(0, 3), priority=5)
    harness.step()
    harness.add("early", ids(100, 9), priority=0)
    assert [item.request.request_id for item in harness.step().scheduled] == ["late", "early"]


def test_first_come_first_served_within_a_priority() -> None:
    harness = Harness(seats=1)
    for name, priority in [("b", 1), ("a1", 0), ("a2", 0)]:
        harness.add(name, ids(len(name) * 100, 3), max_tokens=1, priority=priority)
    order = [next(iter(harness.shares())) for _ in range(3)]
    assert order == ["a1", "a2", "b"]


def test_a_request_waits_for_a_block_that_is_being_computed_and_others_pass_it() -> None:
    harness = Harness(budget=8)
    harness.add("first", ids(0, 12))
    harness.add("same", [*ids(0, 12), 99])
    harness.add("other", ids(500, 2))
    assert harness.shares() == {"first": 8}
    # "same" could hit two blocks now, but its third is on its way.
    assert harness.shares() == {"first": 4, "other": 2}
    assert harness.shares() == {"first": 1, "other": 1, "same": 1}


def test_waiting_ends_when_the_one_that_computes_is_gone() -> None:
    harness = Harness(budget=8)
    first = harness.add("first", ids(0, 12))
    same = harness.add("same", [*ids(0, 12), 99])
    harness.step()
    harness.scheduler.finish(first)
    assert harness.shares() == {"same": 5}
    assert same.num_cached_tokens == 8


def test_the_last_in_the_order_is_preempted_and_comes_back() -> None:
    harness = Harness(num_blocks=7, seats=2)  # six blocks to hold
    keep = harness.add("keep", ids(0, 8), max_tokens=12)
    victim = harness.add("victim", ids(100, 7), max_tokens=6)
    harness.step()
    preempted: list[str] = []
    while keep.status is not RequestStatus.FINISHED:
        preempted += [request.request_id for request in harness.step().preempted]
    assert preempted and set(preempted) == {"victim"}
    assert victim.num_preemptions == len(preempted)
    while victim.status is not RequestStatus.FINISHED:
        harness.step()
    assert victim.num_tokens == 13
    assert harness.kv.stats().held == 0


def test_nobody_is_let_in_who_would_be_preempted_at_once() -> None:
    harness = Harness(num_blocks=7, seats=4)  # six blocks to hold
    harness.add("a", ids(0, 8))
    harness.add("b", ids(100, 11))
    harness.add("c", ids(200, 4))
    # b needs three blocks and must leave one for a to grow into; c needs one and two.
    assert harness.shares() == {"a": 8, "b": 8}
    assert harness.scheduler.num_waiting == 1


def test_abort_gives_everything_back_in_every_state() -> None:
    harness = Harness(num_blocks=9)
    requests = [harness.add(str(i), ids(100 * i, 10)) for i in range(4)]
    harness.step()
    for request in requests:
        harness.scheduler.finish(request)
        check_blocks(harness.kv)
    assert harness.scheduler.num_waiting == harness.scheduler.num_running == 0
    assert harness.kv.stats().held == 0


MIXES = ["three_full", "gemma", "ministral", "llama4", "jamba", "mamba"]


@pytest.mark.parametrize("mix", MIXES)
@settings(max_examples=examples(50))
@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(1, 12), st.integers(0, 1)),
        min_size=1,
        max_size=12,
    ),
    num_blocks=st.integers(3, 14),
    seats=st.integers(1, 4),
    budget=st.integers(4, 24),
)
def test_every_request_that_fits_alone_finishes_whatever_the_groups(
    mix: str,
    prompts: list[tuple[int, int, int, int]],
    num_blocks: int,
    seats: int,
    budget: int,
) -> None:
    """Whatever content lies around in the pages, and however it is scattered."""
    harness = Harness(num_blocks=num_blocks, seats=seats, budget=budget, mix=mix)
    fitting = [p for p in prompts if harness.kv.fits(p[1] + p[2])]
    run_to_the_end(harness, fitting)


def run_to_the_end(harness: Harness, prompts: list[tuple[int, int, int, int]]) -> None:
    """Requests of (family, length, max_tokens, priority); a family shares its prefixes."""
    requests = [
        harness.add(str(i), ids(100 * family, length), max_tokens=max_tokens, priority=priority)
        for i, (family, length, max_tokens, priority) in enumerate(prompts)
    ]
    for _ in range(2000):
        output = harness.step()
        for item in output.scheduled:
            if not item.request.params.max_tokens and item.request.num_computed_tokens == (
                item.request.num_tokens
            ):
                harness.scheduler.finish(item.request)
        if not harness.scheduler.num_waiting and not harness.scheduler.num_running:
            break
        assert output.scheduled, "a step in which nobody runs would repeat for ever"
    assert all(request.status is RequestStatus.FINISHED for request in requests)
    assert all(request.num_tokens == request.max_num_tokens for request in requests)
    assert harness.kv.stats().held == 0


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
