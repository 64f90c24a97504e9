"""The queue gives the same request as a list that looks at every one of them."""

from __future__ import annotations

from collections.abc import Set
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.requests.request import Request
from engine.scheduling.request_queues import WaitingQueue, _Branch
from prefix_cache import BlockHash
from tests.support.examples import examples

PATHS = st.lists(st.sampled_from([0, 0, 0, 1, 2]), max_size=6)


def hashes_of(tokens: list[int]) -> tuple[BlockHash, ...]:
    """Each stands for those before it as well."""
    return tuple(BlockHash(bytes(tokens[: end + 1])) for end in range(len(tokens)))


def request_of(number: int, priority: int = 0) -> Request:
    fields: dict[str, Any] = {"request_id": f"r{number}", "queue_key": (priority, number)}
    return cast(Request, SimpleNamespace(**fields))


class QueueMachine(RuleBasedStateMachine):
    """Requests come, go, and are left out, one by one or all that begin alike."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.waiting: dict[str, tuple[Request, tuple[BlockHash, ...]]] = {}
        self.left_out: list[tuple[BlockHash, ...]] = []
        self.kept: list[set[BlockHash]] = []
        self.passed: set[str] = set()
        self.number = 0

    def expected(self) -> list[Request]:
        """What is not left out, in order."""
        return sorted(
            (
                request
                for request, hashes in self.waiting.values()
                if request.request_id not in self.passed
                and all(
                    hashes[: len(start)] != start or bool(set(hashes[len(start) :][:1]) & kept)
                    for start, kept in zip(self.left_out, self.kept, strict=True)
                )
            ),
            key=lambda r: r.queue_key,
        )

    @precondition(lambda self: not self.left_out)
    @rule(tokens=PATHS, priority=st.integers(0, 2))
    def add(self, tokens: list[int], priority: int) -> None:
        self.number += 1
        request = request_of(self.number, priority)
        self.waiting[request.request_id] = request, hashes_of(tokens)
        self.queue.add(request, hashes_of(tokens))

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, 30))
    def remove(self, index: int) -> None:
        request, _ = self.waiting.pop(sorted(self.waiting)[index % len(self.waiting)])
        self.queue.remove(request)

    @precondition(lambda self: self.expected())
    @rule()
    def take_first(self) -> None:
        request = self.expected()[0]
        del self.waiting[request.request_id]
        self.queue.remove(request)

    @precondition(lambda self: self.expected())
    @rule(index=st.integers(0, 5))
    def pass_over(self, index: int) -> None:
        expected = self.expected()
        request = expected[index % len(expected)]
        self.passed.add(request.request_id)
        self.queue.pass_over(request)

    @precondition(lambda self: self.expected())
    @rule(num_hashes=st.integers(1, 7), keeps=st.sets(st.integers(0, 2)), any_kept=st.booleans())
    def pass_over_alike(self, num_hashes: int, keeps: set[int], any_kept: bool) -> None:
        request = self.expected()[0]
        hashes = self.waiting[request.request_id][1]
        if num_hashes > len(hashes):
            self.passed.add(request.request_id)
            self.queue.pass_over_alike(request, num_hashes)
            return
        nexts = {BlockHash(hashes[num_hashes - 1] + bytes([token])) for token in keeps}
        nexts -= {*hashes[num_hashes:][:1]}

        def choose(given: Set[BlockHash]) -> Set[BlockHash]:
            return given & (nexts | {*hashes[num_hashes:][:1]})

        self.left_out.append(hashes[:num_hashes])
        self.kept.append(nexts if any_kept else set())
        self.queue.pass_over_alike(request, num_hashes, choose if any_kept else None)

    @rule()
    def reopen(self) -> None:
        self.left_out.clear()
        self.kept.clear()
        self.passed.clear()
        self.queue.reopen()

    @invariant()
    def the_first_is_the_first_that_is_not_left_out(self) -> None:
        expected = self.expected()
        assert self.queue.first() is (expected[0] if expected else None)
        assert len(self.queue) == len(self.waiting)
        assert {request.request_id for request in self.queue} == self.waiting.keys()

    @invariant()
    def no_branch_is_kept_for_nothing(self) -> None:
        branches = [self.queue._root]
        for branch in branches:
            branches += branch.children.values()
            assert len(branch.heap) <= 2 * (branch.num_own + len(branch.children)) + 40
            if branch.parent is not None and not self.left_out:
                assert branch.num_own or len(branch.children) > 1

    def teardown(self) -> None:
        self.reopen()
        for request in self.expected():
            assert self.queue.first() is request
            self.queue.remove(request)
        assert self.queue.first() is None and not self.queue._root.children


QueueMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestWaitingQueue = QueueMachine.TestCase


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
