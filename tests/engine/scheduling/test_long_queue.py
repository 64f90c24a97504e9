"""A step's work is that of what it lets in, however many wait; and what rests stands in no way."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from engine.requests.request import Request, RequestStatus
from prefix_cache import KVCacheManager
from tests.support.scheduler_harness import BLOCK_SIZE, Harness, ids

MANY = 2000


@pytest.fixture
def looked_for(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the sequences whose prefixes were looked for."""
    lengths: list[int] = []
    find = KVCacheManager.find_cached_prefix

    def noting(self: KVCacheManager, hashes, num_tokens, *args):
        lengths.append(num_tokens)
        return find(self, hashes, num_tokens, *args)

    monkeypatch.setattr(KVCacheManager, "find_cached_prefix", noting)
    return lengths


def num_looked_for(harness: Harness, looked_for: list[int]) -> int:
    looked_for.clear()
    harness.step()
    return len(looked_for)


@pytest.mark.parametrize("mix", ["full", "gemma", "jamba", "mamba"])
@pytest.mark.parametrize("num_own", [1, 3 * BLOCK_SIZE])
def test_requests_that_wait_for_one_prefix_are_looked_at_once(
    mix: str, num_own: int, looked_for: list[int]
) -> None:
    harness = Harness(mix=mix, num_blocks=400, budget=200, seats=4)
    for number in range(MANY):
        prompt = [*ids(0, 90), *ids(1000 + 50 * number, num_own)]
        harness.add(str(number), prompt, max_tokens=50)
    for _ in range(5):
        # Those that are let in, the first that is not, and the groups that wait.
        assert num_looked_for(harness, looked_for) <= 4 + 1 + 2
    assert harness.scheduler.num_running == 4


def calls_of_steps(mix: str, num_waiting: int, num_steps: int = 8) -> list[int]:
    """How many functions each step calls, Python's own included, of conversations in pairs."""
    harness = Harness(mix=mix, num_blocks=400, budget=200, seats=4)
    for number in range(num_waiting):
        shared = [*ids(0, 90), *ids(1000 + 50 * (number // 2), 3 * BLOCK_SIZE)]
        harness.add(str(number), [*shared, 10**6 + number], max_tokens=50)
    counts = []
    for _ in range(num_steps):
        num_calls = 0

        def count(_frame: FrameType, event: str, _argument: object) -> None:
            nonlocal num_calls
            num_calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            output = harness.scheduler.schedule()
        finally:
            sys.setprofile(None)
        counts.append(num_calls)
        harness.scheduler.complete(output)
    return counts


@pytest.mark.parametrize("mix", ["full", "gemma", "jamba", "mamba"])
def test_a_step_does_the_same_however_many_wait(mix: str) -> None:
    few = calls_of_steps(mix, 24)
    assert max(few) > 100
    # Finalizers of what the collector finds may run in between.
    assert calls_of_steps(mix, 1000) == pytest.approx(few, rel=0.02)


def test_requests_that_rest_are_not_looked_at(looked_for: list[int]) -> None:
    harness = Harness(seats=4)
    resting = [harness.add(f"resting {n}", ids(50 * n, 9)) for n in range(MANY)]
    for request in resting:
        harness.scheduler.pause(request)
    running = harness.add("running", ids(10**6, 9), max_tokens=9)
    assert num_looked_for(harness, looked_for) == 1
    assert num_looked_for(harness, looked_for) == 0
    assert harness.scheduler.num_waiting == MANY and harness.scheduler.has_idle_requests
    harness.scheduler.resume(resting[1])
    assert list(harness.shares()) == ["running", "resting 1"]
    assert running.status is RequestStatus.RUNNING


def test_isolated_requests_are_found_without_looking_at_the_others(
    looked_for: list[int],
) -> None:
    harness = Harness(seats=2, budget=30)
    for number in range(MANY):
        harness.add(str(number), ids(50 * number, 9))
    harness.fail()
    assert [list(harness.shares()) for _ in range(2)] == [["0"], ["0"]]
    looked_for.clear()
    assert list(harness.shares()) == ["1"]
    assert len(looked_for) == 1
    assert len(harness.scheduler.fault_isolation._isolated) <= 2


def run_to_the_end(harness: Harness, *requests: Request) -> None:
    for _ in range(100):
        if all(request.status is RequestStatus.FINISHED for request in requests):
            return
        assert harness.step().scheduled
    raise AssertionError(f"{requests} never end")


def paused_holder(harness: Harness, name: str, length: int, **options: int) -> Request:
    request = harness.add(name, ids(10_000 * (1 + harness.arrivals), length), **options)
    harness.step()
    assert request.status is RequestStatus.RUNNING
    harness.scheduler.pause(request)
    return request


@pytest.mark.parametrize("swaps", [False, True])
def test_a_paused_request_gives_its_blocks_to_one_that_waits(swaps: bool) -> None:
    harness = Harness(num_blocks=9, budget=64, swaps=swaps)  # eight to hold
    first = paused_holder(harness, "first", 12, priority=-2)
    last = paused_holder(harness, "last", 12, priority=-1)
    waiting = harness.add("waiting", ids(0, 16), max_tokens=2)
    assert harness.shares() == {"waiting": 16}
    # The last in the order has gone, whatever came first, and no more than had to.
    assert first.status is RequestStatus.RUNNING and last.status is not RequestStatus.RUNNING
    assert (first.num_preemptions, last.num_preemptions) == (0, 1)
    harness.step()
    assert waiting.status is RequestStatus.FINISHED
    for request in (first, last):
        harness.scheduler.resume(request)
    run_to_the_end(harness, first, last)
    assert [r.num_tokens for r in (first, last)] == [16, 16]


@pytest.mark.parametrize("swaps", [False, True])
def test_a_paused_request_gives_its_seat_to_one_that_waits(swaps: bool) -> None:
    harness = Harness(seats=1, swaps=swaps)
    resting = paused_holder(harness, "resting", 9)
    harness.add("waiting", ids(0, 8), max_tokens=2)
    assert harness.shares() == {"waiting": 8}
    assert resting.num_preemptions == 1
    harness.scheduler.resume(resting)
    assert harness.shares() == {"waiting": 1}
    assert list(harness.shares()) == ["resting"]


def test_no_paused_request_gives_way_while_there_is_room() -> None:
    harness = Harness(num_blocks=30)
    resting = paused_holder(harness, "resting", 12)
    harness.add("waiting", ids(0, 16), max_tokens=8)
    assert harness.shares() == {"waiting": 16}
    assert resting.num_preemptions == 0
    harness.scheduler.resume(resting)
    assert set(harness.shares()) == {"resting", "waiting"}


def test_a_paused_request_gives_way_before_one_that_runs() -> None:
    harness = Harness(num_blocks=9, seats=2)
    resting = paused_holder(harness, "resting", 12, priority=-1)
    grows = harness.add("grows", ids(0, 12), max_tokens=16)
    while grows.status is not RequestStatus.FINISHED:
        assert list(harness.shares()) == ["grows"]
    assert (grows.num_preemptions, resting.num_preemptions) == (0, 1)


def test_a_swapped_request_comes_back_though_a_paused_one_holds_blocks() -> None:
    harness = Harness(num_blocks=9, seats=3, swaps=True)
    keeps = harness.add("keeps", ids(0, 8), max_tokens=14)
    goes = harness.add("goes", ids(100, 8), max_tokens=14)
    while goes.status is not RequestStatus.SWAPPED:
        harness.step()
    # It rests with what it holds, and one is out that would need the same pages.
    harness.scheduler.pause(keeps)
    run_to_the_end(harness, goes)
    harness.scheduler.resume(keeps)
    run_to_the_end(harness, keeps)


def test_a_request_that_is_paused_and_gone_can_be_resumed_and_aborted() -> None:
    harness = Harness(num_blocks=9, swaps=True)
    requests = [paused_holder(harness, str(n), 10) for n in range(2)]
    harness.add("other", ids(0, 28), max_tokens=2)
    harness.step()
    for request in requests:
        assert request.status is not RequestStatus.RUNNING
        harness.scheduler.pause(request)
    harness.scheduler.finish(requests[0])
    assert harness.scheduler.num_waiting == 1
    harness.scheduler.resume(requests[1])
    harness.scheduler.resume(requests[1])
    run_to_the_end(harness, requests[1])
    assert harness.kv.stats().held == 0 and not harness.scheduler.has_idle_requests
