"""Decides each step who runs how many tokens, and who waits."""

from __future__ import annotations

from bisect import insort

from engine.request import Request, RequestStatus
from engine.scheduler_output import ScheduledRequest, SchedulerOutput
from prefix_cache import KVCacheManager

__all__ = ["Scheduler"]


class Scheduler:
    """Continuous batching under a token budget.

    A step serves, in order of ``Request.queue_key``:

    1. every running request: one token if it decodes, else the next chunk of its prompt. A
       chunk leaves one token of budget for each running request behind it, so that a long
       prompt never stalls the others' decoding;
    2. waiting requests, as long as budget, seats and blocks last.

    When a running request finds no free block, the last running request in the order is
    preempted: its blocks go back, its tokens stay, and it waits to be recomputed (or to hit its
    own blocks, if they are still cached). The first request in the order can therefore always
    finish, because admission refuses what could never fit alone.

    A waiting request whose next uncached block is being computed by a running request waits for
    that block to be published rather than compute it a second time.

    Args:
        kv_cache_manager: owns the blocks.
        block_size: tokens per block.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: token budget of a step.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._kv = kv_cache_manager
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Queue a request that has been validated."""
        insort(self._waiting, request, key=lambda r: r.queue_key)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step. Blocks for its tokens are held when this returns."""
        preempted: list[Request] = []
        scheduled, budget = self._schedule_running(preempted)
        if not preempted:
            scheduled += self._admit_waiting(budget)
        scheduled.sort(key=lambda item: item.num_tokens > 1)
        return SchedulerOutput(tuple(scheduled), tuple(preempted))

    def _schedule_running(self, preempted: list[Request]) -> tuple[list[ScheduledRequest], int]:
        budget = self._max_num_batched_tokens
        scheduled: list[ScheduledRequest] = []
        while len(scheduled) < len(self._running):
            request = self._running[len(scheduled)]
            seats_behind = len(self._running) - len(scheduled) - 1
            num_tokens = min(
                request.num_tokens - request.num_computed_tokens, budget - seats_behind
            )
            if self._hold_slots(request, num_tokens, preempted):
                scheduled.append(ScheduledRequest(request, num_tokens))
                budget -= num_tokens
        return scheduled, budget

    def _hold_slots(self, request: Request, num_tokens: int, preempted: list[Request]) -> bool:
        """Get blocks for a running request, preempting from the end of the order.

        Victims are never scheduled already, because requests are served in the same order.
        Returns False if the request itself had to go.
        """
        while not self._kv.allocate_slots(
            request.request_id, request.num_computed_tokens + num_tokens
        ):
            victim = self._running[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _admit_waiting(self, budget: int) -> list[ScheduledRequest]:
        admitted: list[ScheduledRequest] = []
        for request in tuple(self._waiting):
            if not budget or len(self._running) == self._max_num_seqs:
                break
            if self._kv.enable_prefix_caching:
                request.extend_hashes(self._block_size)
            prefix = self._kv.find_cached_prefix(request.block_hashes, request.num_tokens)
            if prefix.in_flight:
                continue
            # A request is let in only if all of its tokens fit, and a block stays for each
            # running request to grow into; otherwise it would be preempted right away.
            if not self._kv.can_allocate(
                request.request_id,
                request.num_tokens,
                prefix=prefix,
                headroom=len(self._running),
            ):
                break
            num_tokens = min(request.num_tokens - prefix.num_tokens, budget)
            self._kv.allocate_slots(
                request.request_id,
                prefix.num_tokens + num_tokens,
                prefix=prefix,
                block_hashes=request.block_hashes,
            )
            self._start(request, prefix.num_tokens)
            admitted.append(ScheduledRequest(request, num_tokens))
            budget -= num_tokens
        return admitted

    def _start(self, request: Request, num_hit_tokens: int) -> None:
        self._waiting.remove(request)
        insort(self._running, request, key=lambda r: r.queue_key)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_hit_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_hit_tokens

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._kv.free(request.request_id)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.add(request)

    def complete(self, output: SchedulerOutput) -> None:
        """Record that a step has run and its rows are written; publish what became full."""
        for item in output.scheduled:
            request = item.request
            full_before = request.num_computed_tokens // self._block_size
            request.num_computed_tokens += item.num_tokens
            if not self._kv.enable_prefix_caching:
                continue
            if request.num_computed_tokens // self._block_size > full_before:
                request.extend_hashes(self._block_size)
                self._kv.publish(
                    request.request_id, request.block_hashes, request.num_computed_tokens
                )

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is, and give back what it holds."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._kv.free(request.request_id)
        elif request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
