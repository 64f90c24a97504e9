"""Decides for each step which requests run how many tokens, and which wait."""

from __future__ import annotations

from collections.abc import Iterable

from engine.requests.request import Request, RequestStatus
from engine.scheduling.admission import Admission
from engine.scheduling.encoder_cache_manager import EncoderCacheManager, EncodingBudget
from engine.scheduling.fault_isolation import FaultIsolation
from engine.scheduling.request_queues import RequestQueues
from engine.scheduling.scheduler_output import SchedulerOutput, StepPlan
from prefix_cache import KVCacheManager, SwapSpace

__all__ = ["Scheduler"]


class Scheduler:
    """Continuous batching under a token budget.

    A step serves, in order of ``Request.queue_key``:

    1. every running request: one token if it decodes, else the next chunk of its prompt. A chunk
    leaves one token of budget for each running request behind it: a prompt never stalls decoding;
    2. requests that were swapped out, before any new one; 3. waiting requests, as long as budget,
    seats and blocks last.

    When a running request finds no free block, the last running request in the order is
    preempted: its blocks go back, its tokens stay, and it waits to be recomputed (or to hit its
    own blocks, if they are still cached). With swap space its pages move to the host instead, as
    long as there is room, and it goes on where it was; once copying them has failed, requests are
    recomputed instead. The first request in the order can therefore always finish, because
    what could never fit alone is refused before, see :mod:`engine.inputs.fit_check`.

    Items that have to be encoded, images say, cut chunks: a chunk ends before an item for which the
    encoding budget, or the encoder cache, has no room in this step. Empty ones are left out.

    A waiting request whose next uncached block is being computed by a running request waits for
    that block to be published rather than compute it a second time. All that begin alike up to that
    block are passed over together, so a step does not cost more for a longer queue.

    A request that is idle, because its caller paused it or its next row has not come yet, stays
    where it is with what it holds, is left out of the steps, and may be preempted like any other.
    What waits behind it is served meanwhile: where blocks or seats run short, paused requests give
    theirs back before any other does, the last in the order first.

    Args:
        kv_cache_manager: owns the blocks.
        block_size: tokens per block.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: token budget of a step.
        max_num_encoder_tokens: rows that towers, or the encoder of an encoder-decoder, give in a
            step at most; a longer input runs alone.
        swap_space: where preempted requests go; None recomputes them.
        encoder_cache_manager: holds rows of images and the like; None for a model without.

    Attributes:
        fault_isolation: what to ask after a step that failed.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_encoder_tokens: int | None = None,
        swap_space: SwapSpace | None = None,
        encoder_cache_manager: EncoderCacheManager | None = None,
    ) -> None:
        self._kv = kv_cache_manager
        self._block_size = block_size
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_encoder_tokens = max_num_encoder_tokens
        self._queues = RequestQueues(kv_cache_manager, swap_space, encoder_cache_manager)
        self._running = self._queues.running
        self._admission = Admission(kv_cache_manager, self._queues, block_size, max_num_seqs)
        self.fault_isolation = FaultIsolation(self._queues)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, swapped ones and those that rest included."""
        return len(self._queues.waiting) + len(self._queues.swapped) + len(self._queues.resting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return self._queues.num_running

    @property
    def num_preemptions(self) -> int:
        """How often a request had to give its blocks back."""
        return self._admission.num_preemptions

    @property
    def has_idle_requests(self) -> bool:
        """Whether a request waits for its caller: to be resumed, or for its next row."""
        if self._queues.holders or self._queues.resting:
            return True
        return any(request.is_paused or request.needs_input for request in self._queues)

    def add(self, request: Request) -> None:
        """Queue a request that has been validated."""
        self._queues.add(request)

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is, and give back what it holds."""
        self._queues.finish(request)

    def clear(self) -> None:
        """Forget every request and all that is held, whatever an interrupted call left of it."""
        self._queues.clear()
        self.fault_isolation.clear()

    def pause(self, request: Request) -> None:
        """Leave a request out of the steps until it is resumed."""
        request.is_paused = True
        # Other requests are not to wait for blocks that it does not compute now.
        self._kv.pending.drop_request(request.request_id)
        self._queues.rest(request)

    def resume(self, request: Request) -> None:
        """Let a paused request go on."""
        request.is_paused = False
        self._queues.wake(request)

    def wake(self, requests: Iterable[Request]) -> None:
        """Consider requests again of which more has become known; a paused one rests on."""
        for request in requests:
            self._queues.wake(request)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step. Blocks for its tokens are held when this returns."""
        step = StepPlan(self._max_num_batched_tokens, EncodingBudget(self._max_num_encoder_tokens))
        for alone in (True, False) if self.fault_isolation.has_turn else (False, True):
            if alone:
                self._schedule_isolated(step)
            else:
                self._schedule_together(step)
            if step.scheduled:
                self.fault_isolation.has_turn = not alone
                break
        return step.output()

    def _schedule_together(self, step: StepPlan) -> None:
        """Serve all but isolated requests."""
        self._schedule_running(step)
        # After a preemption none is let in, lest the two take turns; unless none is left to run.
        if not step.scheduled or all(request.is_paused for request in step.preempted):
            self._admission.swap_in(step)
            if not any(r.can_run_from(r.num_computed_tokens) for r in self._queues.swapped):
                self._admission.admit_waiting(step)

    def _schedule_isolated(self, step: StepPlan) -> None:
        """Let the first isolated request that can run have the step to itself."""
        is_blocked = False
        for request in self.fault_isolation.isolated():
            if request.status is RequestStatus.RUNNING:
                num_tokens = self._queues.chunk(request, step.num_tokens)
                share = self._queues.hold_items(request, num_tokens, step.encoding_budget)
                if share.num_tokens and self._hold_slots(request, share.num_tokens, step):
                    step.add(request, share)
            elif not is_blocked and self._admission.may_have_seat:
                is_blocked = not self._admission.consider(request, step)
            if step.scheduled:
                return

    def _schedule_running(self, step: StepPlan) -> None:
        num_served = 0
        while num_served < len(self._running):
            request = self._running[num_served]
            seats_behind = len(self._running) - num_served - 1
            num_tokens = 0
            if not request.is_isolated:
                num_tokens = self._queues.chunk(request, step.num_tokens - seats_behind)
            share = self._queues.hold_items(request, num_tokens, step.encoding_budget)
            if not share.num_tokens:
                num_served += 1
            elif self._hold_slots(request, share.num_tokens, step):
                num_served += 1
                step.add(request, share)

    def _hold_slots(self, request: Request, num_tokens: int, step: StepPlan) -> bool:
        """Get blocks for a running request, preempting from the end of the order.

        Victims are never scheduled already, because requests are served in the same order.
        Returns False if the request itself had to go.
        """
        while not self._queues.grow(request, num_tokens):
            victim = (self._queues.holders or self._running)[-1]
            self._admission.preempt(victim, step)
            if victim is request:
                if not self._running:
                    # It has the pool alone: what is in its way is content scattered over pages.
                    self._kv.reset_prefix_cache()
                return False
        return True

    def complete(self, output: SchedulerOutput) -> None:
        """Record that a step has run and its rows are written; publish what became full."""
        for item in output.scheduled:
            request = item.request
            full_before = request.num_computed_tokens // self._block_size
            request.num_computed_tokens += item.num_tokens
            if not request.is_isolated:
                request.alone_until = 0
            self._queues.release_items(request, passed_only=True)
            if not self._kv.enable_prefix_caching:
                continue
            if item.runs_encoder and request.encoder_blocks is not None:
                self._kv.publish_encoder(request.request_id, request.encoder_blocks)
            if request.num_computed_tokens // self._block_size > full_before:
                request.extend_hashes(self._block_size)
                self._kv.publish(
                    request.request_id, request.block_hashes, request.num_computed_tokens
                )
