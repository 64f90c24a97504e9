"""Who runs when is what a scheduler decides that looks at every waiting request in every step."""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.requests.request import Request, RequestStatus
from engine.scheduling.request_queues import WaitingQueue, _Branch
from engine.scheduling.scheduler import Admission, SchedulerOutput, StepPlan
from prefix_cache import BlockHash
from tests.support.examples import examples
from tests.support.scheduler_harness import Harness


class PlainAdmission(Admission):
    """Looks at one waiting request after the other."""

    def admit_waiting(self, step: StepPlan) -> None:
        for request in sorted(self.queues.waiting, key=lambda r: r.queue_key):
            if not step.num_tokens or not self.may_have_seat:
                break
            prefix = self._find_prefix(request)
            if prefix.in_flight or not request.can_run_from(prefix.num_tokens):
                continue
            if request.is_isolated or not self._let_in(request, prefix, step):
                break


@dataclass(frozen=True)
class Add:
    """A prompt of few different tokens, so that many begin alike."""

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
    """No branch is kept for nothing, and the first is the first that is not left out."""
    branches = [queue._root]
    for branch in branches:
        branches += branch.children.values()
        assert len(branch.heap) <= 2 * (branch.num_own + len(branch.children)) + 40
        if branch.parent is not None and not (queue._closed or queue._passed):
            assert branch.num_own or len(branch.children) > 1
    if not (queue._closed or queue._passed):
        assert queue.first() is min(queue, key=lambda request: request.queue_key, default=None)


class Pair:
    """The same events to both."""

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
        """Whether anybody ran; both schedulers decide alike."""
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


MIXES = ["full", "three_full", "gemma", "ministral", "llama4", "jamba", "mamba"]


@pytest.mark.parametrize("mix", MIXES)
@settings(max_examples=examples(25))
@given(
    events=EVENTS,
    num_blocks=st.integers(12, 40),
    seats=st.integers(1, 6),
    budget=st.integers(4, 60),
    swaps=st.booleans(),
)
def test_the_order_is_that_of_a_plain_loop(
    mix: str, events: list[Event], num_blocks: int, seats: int, budget: int, swaps: bool
) -> None:
    pair = Pair(mix=mix, num_blocks=num_blocks, seats=seats, budget=budget, swaps=swaps)
    for event in events:
        pair.run(event)
    pair.finish()


def test_the_streams_do_wait_for_blocks_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the property above would prove less: groups are passed over, with and without gaps."""
    found: list[tuple[str, bool]] = []
    pass_over_alike = Admission._pass_over_alike

    def noting(self: Admission, request: Request, prefix: object) -> None:
        pass_over_alike(self, request, prefix)  # type: ignore[arg-type]
        found.append((mix, any(branch.but for branch in self.queues.waiting._closed)))

    monkeypatch.setattr(Admission, "_pass_over_alike", noting)
    for mix in ("full", "jamba"):
        pair = Pair(mix=mix, budget=40, num_blocks=60)
        for tail in range(6):
            pair.run(Add((*[0] * 17, *[2 + tail] * (9 + tail)), 2, 0))
        for _ in range(3):
            pair.run(("step", 0))
        pair.finish()
    assert {mix for mix, _ in found} == {"full", "jamba"}


def hashes_of(tokens: list[int]) -> tuple[BlockHash, ...]:
    """Each stands for those before it as well."""
    return tuple(BlockHash(bytes(tokens[: end + 1])) for end in range(len(tokens)))


def request_of(number: int, priority: int = 0) -> Request:
    fields: dict[str, Any] = {"request_id": f"r{number}", "queue_key": (priority, number)}
    return cast(Request, SimpleNamespace(**fields))


@pytest.mark.parametrize("depth", [1, 50])
def test_to_leave_many_out_touches_few(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: how many branches are looked at, of 3,000 requests that begin alike."""
    queue = WaitingQueue()
    for number in range(3000):
        queue.add(request_of(number), hashes_of([0] * depth + [number // 250 + 1, number % 250]))
    looked_at: list[_Branch] = []
    first_of = WaitingQueue._first_of

    def counting(self: WaitingQueue, branch: _Branch) -> Request | _Branch | None:
        looked_at.append(branch)
        return first_of(self, branch)

    monkeypatch.setattr(WaitingQueue, "_first_of", counting)
    for _ in range(20):
        first = queue.first()
        assert first is not None
        queue.pass_over_alike(first, depth)
        assert queue.first() is None
        queue.reopen()
        assert queue.first() is first
    assert len(looked_at) < 20 * 20
