"""Scheduling: token budgets, order, waiting, preemption. No model is needed."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.interface.sampling_params import SamplingParams
from engine.requests.request import Request, RequestStatus
from engine.sampling.sampler import SamplingState
from engine.scheduling.request_queues import WaitingQueue
from engine.scheduling.scheduler import Admission, Scheduler, SchedulerOutput, StepPlan
from engine.text.stop_checker import CompletionText
from prefix_cache import KVCacheManager, SwapSpace
from prefix_cache import check_integrity as check_blocks
from tests.support.examples import examples
from tests.support.tiny_kv_cache import GROUP_MIXES, mixed_config

BLOCK_SIZE = 4


class Harness:
    """A scheduler over real blocks, with a model that always generates token 7."""

    def __init__(
        self,
        *,
        num_blocks: int = 65,
        seats: int = 8,
        budget: int = 16,
        mix: str = "full",
        swaps: bool = False,
    ) -> None:
        # Never the host's ids: the device's pages are what runs short here.
        config = mixed_config(GROUP_MIXES[mix], num_blocks, BLOCK_SIZE, num_host_blocks=500)
        self.kv = KVCacheManager(config, output_names=(), max_num_batched_tokens=budget)
        self.scheduler = Scheduler(
            self.kv,
            block_size=BLOCK_SIZE,
            max_num_seqs=seats,
            max_num_batched_tokens=budget,
            swap_space=SwapSpace(self.kv, num_blocks) if swaps else None,
        )
        self.seats = seats
        self.budget = budget
        self.arrivals = 0

    def add(
        self, name: str, prompt: list[int], *, max_tokens: int = 4, priority: int = 0
    ) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        request = Request(
            request_id=name,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            prompt_embeds=None,
            params=params,
            max_num_tokens=len(prompt) + max_tokens,
            queue_key=(priority, self.arrivals),
            cache_salt=None,
            sampling=SamplingState(
                params, prompt_token_ids=prompt, seed=0, eos_token_ids=(), vocab_size=100_000
            ),
            text=CompletionText(None, params, frozenset()),
        )
        self.arrivals += 1
        self.scheduler.add(request)
        return request

    def step(self) -> SchedulerOutput:
        output = self._schedule()
        sampling = [item.request for item in output.scheduled if item.samples]
        self.scheduler.complete(output)
        for request in sampling:
            request.token_ids.append(7)
            if request.num_tokens == request.max_num_tokens:
                self.scheduler.finish(request)
        check_blocks(self.kv)
        return output

    def fail(self) -> SchedulerOutput:
        """Run a step whose model raises: nothing is computed, and its requests are isolated."""
        output = self._schedule()
        for request in self.scheduler.fault_isolation.recover(output):
            # It ran alone, and the engine would fail it; here it is retried.
            num_tokens = request.num_computed_tokens + output.num_tokens
            self.scheduler.fault_isolation.isolate(request, num_tokens)
            self.scheduler._queues.restart(request)
        check_blocks(self.kv)
        return output

    def _schedule(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        assert output.num_tokens <= self.budget
        assert self.scheduler.num_running <= self.seats
        isolated = [item for item in output.scheduled if item.request.is_isolated]
        assert not isolated or len(output.scheduled) == 1, "an isolated request runs with others"
        return output

    def shares(self) -> dict[str, int]:
        """Run a step; return the number of tokens of each request."""
        return {item.request.request_id: item.num_tokens for item in self.step().scheduled}


def ids(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def test_prompts_share_the_budget_and_the_last_is_chunked() -> None:
    harness = Harness(budget=10)
    for number, length in enumerate([3, 2, 8]):
        harness.add(str(number), ids(100 * number, length))
    assert harness.shares() == {"0": 3, "1": 2, "2": 5}
    assert harness.shares() == {"0": 1, "1": 1, "2": 3}


def test_a_long_prompt_leaves_a_token_for_each_later_request() -> None:
    harness = Harness(budget=8)
    harness.add("short", ids(0, 3), max_tokens=9)
    harness.add("long", ids(100, 50), priority=-1)
    # The long request is first in the order, but the short one still decodes in every step.
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
    # "same" could hit two blocks now, but its third is being computed.
    assert harness.shares() == {"first": 4, "other": 2}
    assert harness.shares() == {"first": 1, "other": 1, "same": 1}


def test_waiting_ends_when_the_computing_request_ends() -> None:
    harness = Harness(budget=8)
    first = harness.add("first", ids(0, 12))
    same = harness.add("same", [*ids(0, 12), 99])
    harness.step()
    harness.scheduler.finish(first)
    assert harness.shares() == {"same": 5}
    assert same.num_cached_tokens == 8


def test_the_last_in_the_order_is_preempted_and_resumed() -> None:
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


def test_a_request_that_would_be_preempted_at_once_is_not_admitted() -> None:
    harness = Harness(num_blocks=7, seats=4)  # six blocks to hold
    harness.add("a", ids(0, 8))
    harness.add("b", ids(100, 11))
    harness.add("c", ids(200, 4))
    # b needs three blocks and must leave one for a to grow into; c needs one and two.
    assert harness.shares() == {"a": 8, "b": 8}
    assert harness.scheduler.num_waiting == 1


def test_abort_frees_all_blocks_in_every_state() -> None:
    harness = Harness(num_blocks=9)
    requests = [harness.add(str(i), ids(100 * i, 10)) for i in range(4)]
    harness.step()
    for request in requests:
        harness.scheduler.finish(request)
        check_blocks(harness.kv)
    assert harness.scheduler.num_waiting == harness.scheduler.num_running == 0
    assert harness.kv.stats().held == 0


MIXES = ["three_full", "gemma", "ministral", "jamba", "mamba"]


@pytest.mark.parametrize("mix", MIXES)
@settings(max_examples=examples(40))
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
    mix: str, prompts: list[tuple[int, int, int, int]], num_blocks: int, seats: int, budget: int
) -> None:
    """For any cached content and any fragmentation of pages."""
    harness = Harness(num_blocks=num_blocks, seats=seats, budget=budget, mix=mix)
    fitting = [p for p in prompts if harness.kv.fits(p[1] + p[2])]
    requests = add_all(harness, fitting)
    finish_all(harness, *requests)
    assert all(request.num_tokens == request.max_num_tokens for request in requests)
    assert harness.kv.stats().held == 0


def add_all(harness: Harness, prompts: list[tuple[int, int, int, int]]) -> list[Request]:
    """Add requests (family, length, max_tokens, priority); a family shares its prefixes."""
    return [
        harness.add(str(i), ids(100 * family, length), max_tokens=max_tokens, priority=priority)
        for i, (family, length, max_tokens, priority) in enumerate(prompts)
    ]


def finish_all(harness: Harness, *requests: Request) -> None:
    for _ in range(2000):
        if all(request.status is RequestStatus.FINISHED for request in requests):
            return
        assert harness.step().scheduled, "a step without running requests would repeat forever"
    raise AssertionError(f"{requests} never end")


def begun(harness: Harness, requests: list[Request]) -> list[str]:
    """Run to the end; return the names in the order of their first step."""
    order: list[str] = []
    for _ in range(500):
        order += [name for name in harness.shares() if name not in order]
        if all(request.status is RequestStatus.FINISHED for request in requests):
            return order
    raise AssertionError(f"{requests} never end; {order} began")


def isolate(harness: Harness, name: str, start: int, length: int, *, priority: int = 0) -> Request:
    """Add a request that has not begun and whose whole prompt was in a failed step."""
    request = harness.add(name, ids(start, length), priority=priority)
    harness.scheduler.fault_isolation.isolate(request, length)
    return request


def test_after_a_failed_step_each_request_runs_alone_until_past_it() -> None:
    harness = Harness(budget=10)
    for number, length in enumerate([3, 2, 8]):
        harness.add(str(number), ids(100 * number, length))
    assert {item.request.request_id: item.num_tokens for item in harness.fail().scheduled} == {
        "0": 3,
        "1": 2,
        "2": 5,
    }
    assert harness.shares() == {"0": 3}
    assert harness.shares() == {"0": 1}, "the cleared request's turn"
    assert harness.shares() == {"1": 2}
    assert harness.shares() == {"0": 1, "1": 1}
    assert harness.shares() == {"2": 8}
    assert harness.shares() == {"0": 1, "1": 1, "2": 1}


def test_the_first_isolated_request_in_the_order_runs_first_even_if_another_has_begun() -> None:
    harness = Harness(budget=8)
    first = isolate(harness, "first", 0, 20)
    isolate(harness, "second", 100, 20, priority=1)
    harness.scheduler.pause(first)
    assert harness.shares() == {"second": 8}
    harness.scheduler.resume(first)
    assert [harness.shares() for _ in range(3)] == [{"first": 8}, {"first": 8}, {"first": 4}]


def test_isolated_requests_take_no_occupied_seats() -> None:
    harness = Harness(seats=2)
    requests = [harness.add(name, ids(100 * n, 5)) for n, name in enumerate("ab")]
    harness.fail()
    requests += [
        harness.add(name, ids(900 + 100 * n, 5), priority=-1) for n, name in enumerate("cd")
    ]
    # The harness checks that at most two requests run.
    assert begun(harness, requests)[:2] == ["a", "c"]


def test_no_request_begins_before_an_earlier_isolated_one() -> None:
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


def test_a_later_request_passes_a_paused_isolated_one() -> None:
    harness = Harness()
    resting = isolate(harness, "resting", 100, 8)
    harness.scheduler.pause(resting)
    later = harness.add("later", ids(300, 4))
    assert begun(harness, [later]) == ["later"]
    harness.scheduler.resume(resting)
    assert begun(harness, [resting]) == ["resting"]


def test_a_preempted_isolated_request_is_recomputed_and_not_swapped() -> None:
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


@settings(max_examples=examples(120))
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
    requests = add_all(harness, prompts)
    for fails in failures:
        if harness.scheduler.num_waiting or harness.scheduler.num_running:
            harness.fail() if fails else harness.step()
    begun(harness, [r for r in requests if r.status is not RequestStatus.FINISHED] or requests)
    assert all(request.num_tokens == request.max_num_tokens for request in requests)
    assert harness.kv.stats().held == 0


class PlainAdmission(Admission):
    """Checks waiting requests one after another."""

    def admit_waiting(self, step: StepPlan) -> None:
        for request in sorted(self.queues.waiting, key=lambda r: r.queue_key):
            if not step.num_tokens or not self.may_have_seat:
                break
            prefix = self._find_prefix(request)
            if prefix.in_flight or not request.can_run_from(prefix.num_tokens):
                continue
            if request.is_isolated or not self._try_admit(request, prefix, step):
                break


@dataclass(frozen=True)
class Add:
    """A prompt of few different tokens, so that many prompts share prefixes."""

    prompt: tuple[int, ...]
    max_tokens: int
    priority: int


Event = Add | tuple[str, int]

PROMPTS = st.one_of(
    st.lists(st.sampled_from([0, 0, 0, 0, 0, 1]), min_size=1, max_size=40),
    st.tuples(st.integers(1, 36), st.integers(0, 9), st.integers(0, 9)).map(
        lambda drawn: [0] * drawn[0] + [2 + drawn[2]] * drawn[1]
    ),
)
EVENTS = st.lists(
    st.one_of(
        st.builds(Add, PROMPTS.map(tuple), st.integers(1, 8), st.integers(0, 1)),
        st.tuples(
            st.sampled_from(["step", "step", "step", "pause", "resume", "abort", "fail"]),
            st.integers(0, 20),
        ),
    ),
    min_size=5,
    max_size=60,
)


def decided(output: SchedulerOutput) -> tuple[list[tuple[str, int]], list[str]]:
    ran = [(item.request.request_id, item.num_tokens) for item in output.scheduled]
    return ran, [request.request_id for request in output.preempted]


def check_queue(queue: WaitingQueue) -> None:
    """Check that every branch is needed and that the first is the first one not excluded."""
    branches = [queue._root]
    for branch in branches:
        branches += branch.children.values()
        assert len(branch.heap) <= 2 * (branch.num_own + len(branch.children)) + 40
        if branch.parent is not None and not (queue._closed or queue._skipped):
            assert branch.num_own or len(branch.children) > 1
    if not (queue._closed or queue._skipped):
        assert queue.first() is min(queue, key=lambda request: request.queue_key, default=None)


class Pair:
    """Two schedulers that receive the same events."""

    def __init__(self, **options: object) -> None:
        self.harnesses = [Harness(**options) for _ in range(2)]  # type: ignore[arg-type]
        scheduler = self.harnesses[1].scheduler
        given = {f.name: getattr(scheduler._admission, f.name) for f in fields(Admission)}
        scheduler._admission = PlainAdmission(**given)
        self.requests: list[list[Request]] = []

    def run(self, event: Event) -> None:
        if isinstance(event, Add):
            if self.harnesses[0].kv.fits(len(event.prompt) + event.max_tokens):
                self.requests.append([self.add(harness, event) for harness in self.harnesses])
        elif event[0] in ("step", "fail"):
            self.step(fails=event[0] == "fail")
        elif self.requests:
            pair = self.requests[event[1] % len(self.requests)]
            for harness, request in zip(self.harnesses, pair, strict=True):
                if request.status is RequestStatus.FINISHED:
                    continue
                if event[0] == "pause":
                    harness.scheduler.pause(request)
                elif event[0] == "resume":
                    harness.scheduler.resume(request)
                else:
                    harness.scheduler.finish(request)

    def add(self, harness: Harness, event: Add) -> Request:
        return harness.add(
            f"r{len(self.requests)}",
            list(event.prompt),
            max_tokens=event.max_tokens,
            priority=event.priority,
        )

    def step(self, *, fails: bool = False) -> bool:
        """Run a step in both, check equal decisions; return True if any request ran."""
        ours, plain = (h.fail() if fails else h.step() for h in self.harnesses)
        assert decided(ours) == decided(plain)
        check_queue(self.harnesses[0].scheduler._admission.queues.waiting)
        return bool(ours.scheduled)

    def finish(self) -> None:
        for pair in self.requests:
            for harness, request in zip(self.harnesses, pair, strict=True):
                harness.scheduler.resume(request)
        for _ in range(1000):
            if all(request.status is RequestStatus.FINISHED for request, _ in self.requests):
                return
            assert self.step()
        raise AssertionError("some never end")


ORDER_MIXES = ["full", "three_full", "gemma", "ministral", "jamba", "mamba"]


@pytest.mark.parametrize("mix", ORDER_MIXES)
@settings(max_examples=examples(25))
@given(
    events=EVENTS,
    num_blocks=st.integers(12, 40),
    seats=st.integers(1, 6),
    budget=st.integers(4, 60),
    swaps=st.booleans(),
)
def test_decisions_equal_those_of_a_plain_loop(
    mix: str, events: list[Event], num_blocks: int, seats: int, budget: int, swaps: bool
) -> None:
    pair = Pair(mix=mix, num_blocks=num_blocks, seats=seats, budget=budget, swaps=swaps)
    for event in events:
        pair.run(event)
    pair.finish()


def test_the_drawn_events_wait_for_blocks_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The property above covers groups that are passed over, with and without gaps."""
    found: list[tuple[str, bool]] = []
    skip_same_wait = Admission._skip_same_wait

    def noting(self: Admission, request: Request, prefix: object) -> None:
        skip_same_wait(self, request, prefix)  # type: ignore[arg-type]
        found.append((mix, any(branch.exempt for branch in self.queues.waiting._closed)))

    monkeypatch.setattr(Admission, "_skip_same_wait", noting)
    for mix in ("full", "jamba"):
        pair = Pair(mix=mix, budget=40, num_blocks=60)
        for tail in range(6):
            pair.run(Add((*[0] * 17, *[2 + tail] * (9 + tail)), 2, 0))
        for _ in range(3):
            pair.run(("step", 0))
        pair.finish()
    assert {mix for mix, _ in found} == {"full", "jamba"}


MANY = 2000


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the sequences whose prefixes were looked up."""
    lengths: list[int] = []
    find = KVCacheManager.find_cached_prefix

    def noting(self: KVCacheManager, hashes, num_tokens, *args):
        lengths.append(num_tokens)
        return find(self, hashes, num_tokens, *args)

    monkeypatch.setattr(KVCacheManager, "find_cached_prefix", noting)
    return lengths


def num_looked_up(harness: Harness, looked_up: list[int]) -> int:
    looked_up.clear()
    harness.step()
    return len(looked_up)


@pytest.mark.parametrize("mix", ["full", "gemma", "jamba", "mamba"])
@pytest.mark.parametrize("num_own", [1, 3 * BLOCK_SIZE])
def test_requests_that_wait_for_one_prefix_are_checked_once(
    mix: str, num_own: int, looked_up: list[int]
) -> None:
    harness = Harness(mix=mix, num_blocks=400, budget=200, seats=4)
    for number in range(MANY):
        prompt = [*ids(0, 90), *ids(1000 + 50 * number, num_own)]
        harness.add(str(number), prompt, max_tokens=50)
    for _ in range(5):
        # The admitted requests, the first refused one, and the waiting groups.
        assert num_looked_up(harness, looked_up) <= 4 + 1 + 2
    assert harness.scheduler.num_running == 4


def calls_of_steps(mix: str, num_waiting: int, num_steps: int = 8) -> list[int]:
    """Return the number of function calls, builtins included, of each step of paired requests."""
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
def test_the_cost_of_a_step_does_not_depend_on_the_number_of_waiting_requests(mix: str) -> None:
    few = calls_of_steps(mix, 24)
    assert max(few) > 100
    # Finalizers of collected objects may run in between.
    assert calls_of_steps(mix, 1000) == pytest.approx(few, rel=0.02)


def test_paused_requests_are_not_checked(looked_up: list[int]) -> None:
    harness = Harness(seats=4)
    resting = [harness.add(f"resting {n}", ids(50 * n, 9)) for n in range(MANY)]
    for request in resting:
        harness.scheduler.pause(request)
    running = harness.add("running", ids(10**6, 9), max_tokens=9)
    assert num_looked_up(harness, looked_up) == 1
    assert num_looked_up(harness, looked_up) == 0
    assert harness.scheduler.num_waiting == MANY and harness.scheduler.has_idle_requests
    harness.scheduler.resume(resting[1])
    assert list(harness.shares()) == ["running", "resting 1"]
    assert running.status is RequestStatus.RUNNING


def test_isolated_requests_are_found_without_checking_others(looked_up: list[int]) -> None:
    harness = Harness(seats=2, budget=30)
    for number in range(MANY):
        harness.add(str(number), ids(50 * number, 9))
    harness.fail()
    assert [list(harness.shares()) for _ in range(2)] == [["0"], ["0"]]
    looked_up.clear()
    assert list(harness.shares()) == ["1"]
    assert len(looked_up) == 1
    assert len(harness.scheduler.fault_isolation._isolated) <= 2


def paused_holder(harness: Harness, name: str, length: int, **options: int) -> Request:
    request = harness.add(name, ids(10_000 * (1 + harness.arrivals), length), **options)
    harness.step()
    assert request.status is RequestStatus.RUNNING
    harness.scheduler.pause(request)
    return request


@pytest.mark.parametrize("swaps", [False, True])
def test_a_paused_request_yields_its_blocks_to_a_waiting_one(swaps: bool) -> None:
    harness = Harness(num_blocks=9, budget=64, swaps=swaps)  # eight to hold
    first = paused_holder(harness, "first", 12, priority=-2)
    last = paused_holder(harness, "last", 12, priority=-1)
    waiting = harness.add("waiting", ids(0, 16), max_tokens=2)
    assert harness.shares() == {"waiting": 16}
    # Only the last in the order was preempted, whatever arrived first.
    assert first.status is RequestStatus.RUNNING and last.status is not RequestStatus.RUNNING
    assert (first.num_preemptions, last.num_preemptions) == (0, 1)
    harness.step()
    assert waiting.status is RequestStatus.FINISHED
    for request in (first, last):
        harness.scheduler.resume(request)
    finish_all(harness, first, last)
    assert [r.num_tokens for r in (first, last)] == [16, 16]


@pytest.mark.parametrize("swaps", [False, True])
def test_a_paused_request_yields_its_seat_to_a_waiting_one(swaps: bool) -> None:
    harness = Harness(seats=1, swaps=swaps)
    resting = paused_holder(harness, "resting", 9)
    harness.add("waiting", ids(0, 8), max_tokens=2)
    assert harness.shares() == {"waiting": 8}
    assert resting.num_preemptions == 1
    harness.scheduler.resume(resting)
    assert harness.shares() == {"waiting": 1}
    assert list(harness.shares()) == ["resting"]


def test_a_paused_request_is_not_preempted_while_there_is_room() -> None:
    harness = Harness(num_blocks=30)
    resting = paused_holder(harness, "resting", 12)
    harness.add("waiting", ids(0, 16), max_tokens=8)
    assert harness.shares() == {"waiting": 16}
    assert resting.num_preemptions == 0
    harness.scheduler.resume(resting)
    assert set(harness.shares()) == {"resting", "waiting"}


def test_a_paused_request_is_preempted_before_a_running_one() -> None:
    harness = Harness(num_blocks=9, seats=2)
    resting = paused_holder(harness, "resting", 12, priority=-1)
    grows = harness.add("grows", ids(0, 12), max_tokens=16)
    while grows.status is not RequestStatus.FINISHED:
        assert list(harness.shares()) == ["grows"]
    assert (grows.num_preemptions, resting.num_preemptions) == (0, 1)


def test_a_swapped_request_resumes_although_a_paused_one_holds_blocks() -> None:
    harness = Harness(num_blocks=9, seats=3, swaps=True)
    keeps = harness.add("keeps", ids(0, 8), max_tokens=14)
    goes = harness.add("goes", ids(100, 8), max_tokens=14)
    while goes.status is not RequestStatus.SWAPPED:
        harness.step()
    # It pauses holding its blocks, while a swapped-out request needs the same pages.
    harness.scheduler.pause(keeps)
    finish_all(harness, goes)
    harness.scheduler.resume(keeps)
    finish_all(harness, keeps)


def test_a_paused_and_preempted_request_can_be_resumed_and_aborted() -> None:
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
    finish_all(harness, requests[1])
    assert harness.kv.stats().held == 0 and not harness.scheduler.has_idle_requests
