"""Decides each step who runs how many tokens, and who waits."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from engine.requests.request import Request, RequestStatus
from engine.scheduling.encoder_cache_manager import EncoderBudget, EncoderCacheManager, ItemShare
from engine.scheduling.scheduler_output import ScheduledRequest, SchedulerOutput
from prefix_cache import CachedPrefix, KVCacheManager, PageCopy, SwapSpace

__all__ = ["Scheduler"]


@dataclass(slots=True)
class _Step:
    """A step in the making.

    Attributes:
        num_tokens: what is left of the token budget.
        encoder_budget: what is left of the encoder's.
    """

    num_tokens: int
    encoder_budget: EncoderBudget
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    swapped_out: tuple[PageCopy, ...] = ()
    swapped_in: tuple[PageCopy, ...] = ()
    restored: list[Request] = field(default_factory=list)

    def has_room_to_encode(self, request: Request, prefix: CachedPrefix) -> bool:
        """Whether a request's encoder may run in this step."""
        blocks = request.encoder_blocks
        if blocks is None or prefix.encoder_cached:
            return True
        return self.encoder_budget.allows(blocks.num_tokens)

    def add(self, request: Request, share: ItemShare, *, runs_encoder: bool = False) -> None:
        """Take a request in."""
        self.scheduled.append(
            ScheduledRequest(request, share.num_tokens, runs_encoder, share.to_encode)
        )
        self.num_tokens -= share.num_tokens
        self.encoder_budget = share.budget
        if runs_encoder and request.encoder_blocks:
            self.encoder_budget = share.budget.less(request.encoder_blocks.num_tokens)

    def output(self) -> SchedulerOutput:
        """The step, shortest shares first."""
        return SchedulerOutput(
            tuple(sorted(self.scheduled, key=lambda item: item.num_tokens)),
            tuple(self.preempted),
            self.swapped_out,
            self.swapped_in,
            tuple(self.restored),
        )


class Scheduler:
    """Continuous batching under a token budget.

    A step serves, in order of ``Request.queue_key``:

    1. every running request: one token if it decodes, else the next chunk of its prompt. A
       chunk leaves one token of budget for each running request behind it, so that a long
       prompt never stalls the others' decoding;
    2. requests that were swapped out, before anybody new;
    3. waiting requests, as long as budget, seats and blocks last.

    When a running request finds no free block, the last running request in the order is
    preempted: its blocks go back, its tokens stay, and it waits to be recomputed (or to hit its
    own blocks, if they are still cached). With swap space its pages move to the host instead, as
    long as there is room, and it goes on where it was; once copying them has failed, requests are
    recomputed instead. The first request in the order can therefore always finish, because
    admission refuses what could never fit alone.

    Items that have to be encoded, images say, cut chunks: a chunk ends before an item for which
    the encoder's budget, or its cache, has no room in this step. A chunk of no token at all is left
    out.

    When a step of several requests fails, nobody knows by whose fault. They begin anew, as after a
    preemption, as *suspects*: each runs alone until it is past the tokens of that step. Who fails
    alone is the culprit, and the others go on together. Steps of one suspect take turns with steps
    of all others, and nobody who came later begins before a suspect that could. A fault that many
    requests make together, and none alone, costs all of them their steps again and again, but
    nobody's life.

    A waiting request whose next uncached block is being computed by a running request waits for
    that block to be published rather than compute it a second time.

    A request that is idle, because somebody paused it or its next row has not come yet, stays where
    it is with what it holds, is left out of the steps, and may be preempted like any other. What
    waits behind it is served meanwhile.

    Args:
        kv_cache_manager: owns the blocks.
        block_size: tokens per block.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: token budget of a step.
        max_num_encoder_tokens: encoder tokens that a step runs at most; a longer input runs alone.
        swap_space: where preempted requests go; None recomputes them.
        items: holds the encoder outputs of images and the like; None for a model that takes none.
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
        items: EncoderCacheManager | None = None,
    ) -> None:
        self._kv = kv_cache_manager
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_encoder_tokens = max_num_encoder_tokens
        self._swap = swap_space
        self._items = items
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._swapped: list[Request] = []
        self._swaps_out = swap_space is not None
        self._has_suspects = False
        self._suspects_turn = True
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, swapped ones included."""
        return len(self._waiting) + len(self._swapped)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def has_idle_requests(self) -> bool:
        """Whether a request waits for somebody outside: to resume it, or for its next row."""
        everybody = (*self._waiting, *self._running, *self._swapped)
        return any(request.is_paused or request.needs_input for request in everybody)

    def add(self, request: Request) -> None:
        """Queue a request that has been validated."""
        insort(self._waiting, request, key=lambda r: r.queue_key)

    def pause(self, request: Request) -> None:
        """Leave a request out of the steps until it is resumed."""
        request.is_paused = True
        # Nobody is to wait for blocks that it does not compute now.
        self._kv.pending.drop_request(request.request_id)

    def resume(self, request: Request) -> None:
        """Let a paused request go on."""
        request.is_paused = False

    def schedule(self) -> SchedulerOutput:
        """Choose the next step. Blocks for its tokens are held when this returns."""
        step = _Step(self._max_num_batched_tokens, EncoderBudget(self._max_num_encoder_tokens))
        alone, together = self._schedule_alone, self._schedule_together
        for turn in (alone, together) if self._suspects_turn else (together, alone):
            turn(step)
            if step.scheduled:
                self._suspects_turn = turn is not alone
                break
        return step.output()

    def _schedule_together(self, step: _Step) -> None:
        """Serve all but suspects."""
        self._schedule_running(step)
        # After a preemption nobody is let in, lest the two take turns; unless nobody is left.
        if not step.preempted or not step.scheduled:
            self._swap_in(step)
            if not any(r.can_run_from(r.num_computed_tokens) for r in self._swapped):
                self._admit_waiting(step)

    def _schedule_alone(self, step: _Step) -> None:
        """Let the first suspect that can run have the step to itself."""
        if not self._has_suspects:
            return
        suspects = [r for r in (*self._running, *self._waiting) if r.is_suspect]
        self._has_suspects = bool(suspects)
        is_blocked = False
        for request in sorted(suspects, key=lambda r: r.queue_key):
            if request.status is RequestStatus.RUNNING:
                share = self._take_items(request, self._chunk(request, step.num_tokens), step)
                if share.num_tokens and self._hold_slots(request, share.num_tokens, step):
                    step.add(request, share)
            elif not is_blocked and len(self._running) < self._max_num_seqs:
                is_blocked = not self._consider(request, step)
            if step.scheduled:
                return

    def _schedule_running(self, step: _Step) -> None:
        num_served = 0
        while num_served < len(self._running):
            request = self._running[num_served]
            seats_behind = len(self._running) - num_served - 1
            num_tokens = (
                0 if request.is_suspect else self._chunk(request, step.num_tokens - seats_behind)
            )
            share = self._take_items(request, num_tokens, step)
            if not share.num_tokens:
                num_served += 1
            elif self._hold_slots(request, share.num_tokens, step):
                num_served += 1
                step.add(request, share)

    def _chunk(self, request: Request, budget: int) -> int:
        """How many of a running request's tokens to run; none while it is idle."""
        if not request.can_run_from(request.num_computed_tokens):
            return 0
        num_tokens = self._kv.clip_chunk(
            request.request_id,
            request.num_computed_tokens,
            min(request.num_known_tokens - request.num_computed_tokens, budget),
            request.num_tokens,
        )
        return request.clip_to_view(num_tokens)

    def _take_items(self, request: Request, num_tokens: int, step: _Step) -> ItemShare:
        """Cut a chunk to the items that it can have, and hold these."""
        if self._items is None or not request.multimodal_inputs:
            return ItemShare(num_tokens, (), step.encoder_budget)
        return self._items.take(request, num_tokens, step.encoder_budget)

    def _release_items(self, request: Request, *, passed_only: bool = False) -> None:
        """Give back what a request holds of its items, or what it is done with."""
        if self._items is None or not request.multimodal_inputs:
            return
        if passed_only:
            self._items.release_passed(request)
        else:
            self._items.release(request)
        if not self._kv.enable_prefix_caching:
            self._items.cache.reset()

    def _hold_slots(self, request: Request, num_tokens: int, step: _Step) -> bool:
        """Get blocks for a running request, preempting from the end of the order.

        Victims are never scheduled already, because requests are served in the same order.
        Returns False if the request itself had to go.
        """
        while not self._grow(request, num_tokens):
            victim = self._running[-1]
            self._preempt(victim, step)
            if victim is request:
                if not self._running:
                    # It has the pool alone: what is in its way is content scattered over pages.
                    self._kv.reset_prefix_cache()
                return False
        return True

    def _grow(self, request: Request, num_tokens: int) -> bool:
        return self._kv.allocate_slots(
            request.request_id,
            request.num_computed_tokens + num_tokens,
            num_computed_tokens=request.num_computed_tokens,
            encoder=request.encoder_blocks,
        )

    def _swap_in(self, step: _Step) -> None:
        """Bring swapped requests back, in order, before anybody new is let in."""
        if self._swap is None:
            return
        for request in tuple(self._swapped):
            if not step.num_tokens or len(self._running) == self._max_num_seqs:
                return
            if not request.can_run_from(request.num_computed_tokens):
                continue
            copies = self._swap.swap_in(
                request.request_id, request.block_hashes, headroom=len(self._running)
            )
            if copies is None:
                return
            self._swapped.remove(request)
            self._run(request)
            share = self._take_items(request, self._chunk(request, step.num_tokens), step)
            if share.num_tokens and not self._grow(request, share.num_tokens):
                # It would go out again at once; its pages are better made anew later.
                self._release_items(request)
                self._running.remove(request)
                self._kv.free(request.request_id)
                self._queue_anew(request)
                continue
            step.swapped_in += copies
            if share.num_tokens:
                step.add(request, share)
            else:  # it waits for an image that others have the budget for
                step.restored.append(request)
                self._release_items(request)

    def _admit_waiting(self, step: _Step) -> None:
        for request in tuple(self._waiting):
            if not step.num_tokens or len(self._running) == self._max_num_seqs:
                break
            if request.is_suspect:
                if self._runnable_prefix(request) is not None:
                    break  # it comes before those behind it, in a step of its own
            elif not self._consider(request, step):
                break

    def _runnable_prefix(self, request: Request) -> CachedPrefix | None:
        """What a waiting request begins with; None while it cannot run, whoever else does."""
        if self._kv.enable_prefix_caching:
            request.extend_hashes(self._block_size)
        prefix = self._find_prefix(request)
        return prefix if not prefix.in_flight and request.can_run_from(prefix.num_tokens) else None

    def _consider(self, request: Request, step: _Step) -> bool:
        """Let a waiting request in if it can run now; whether those behind it may be considered."""
        prefix = self._runnable_prefix(request)
        if prefix is None:
            return True
        if not step.has_room_to_encode(request, prefix):
            return False
        if self._admit(request, prefix, step):
            return True
        if self._running:
            return False
        # It fits into an empty pool, but not beside the content that it would build on.
        self._kv.reset_prefix_cache()
        return self._admit(request, self._find_prefix(request), step)

    def _find_prefix(self, request: Request) -> CachedPrefix:
        return self._kv.find_cached_prefix(
            request.block_hashes, request.num_tokens, request.encoder_blocks
        )

    def _admit(self, request: Request, prefix: CachedPrefix, step: _Step) -> bool:
        """Let a request in if all of its tokens fit, and a block stays for each running request.

        Otherwise it would be preempted right away.
        """
        encoder = request.encoder_blocks
        if not self._kv.can_finish(
            request.num_tokens,
            prefix=prefix,
            num_encoder_tokens=encoder.num_tokens if encoder is not None else 0,
            headroom=len(self._running),
        ):
            return False
        num_tokens = min(request.num_known_tokens - prefix.num_tokens, step.num_tokens)
        if prefix.stops is not None:
            num_tokens = prefix.stops.clip(prefix.num_tokens, num_tokens, request.num_tokens)
        request.num_computed_tokens = prefix.num_tokens
        share = self._take_items(request, request.clip_to_view(num_tokens), step)
        if not share.num_tokens:
            return False
        if not self._kv.allocate_slots(
            request.request_id,
            prefix.num_tokens + share.num_tokens,
            num_computed_tokens=prefix.num_tokens,
            encoder=encoder,
            prefix=prefix,
            block_hashes=request.block_hashes,
        ):
            self._release_items(request)
            return False
        self._waiting.remove(request)
        self._run(request)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = prefix.num_tokens
        step.add(request, share, runs_encoder=not prefix.encoder_cached)
        return True

    def _run(self, request: Request) -> None:
        insort(self._running, request, key=lambda r: r.queue_key)
        request.status = RequestStatus.RUNNING

    def _preempt(self, request: Request, step: _Step) -> None:
        self._running.remove(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        step.preempted.append(request)
        self._release_items(request)
        if self._swap is not None and self._swaps_out and not request.is_suspect:
            copies = self._swap.swap_out(request.request_id, request.num_computed_tokens)
            if copies is not None:
                step.swapped_out += copies
                request.status = RequestStatus.SWAPPED
                insort(self._swapped, request, key=lambda r: r.queue_key)
                return
        self._kv.free(request.request_id)
        self._queue_anew(request)

    def _queue_anew(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        self.add(request)

    def run_alone(self, output: SchedulerOutput) -> None:
        """After a step that failed: its requests begin anew, each alone until it is past it."""
        for item in output.scheduled:
            self.suspect(item.request, item.request.num_computed_tokens + item.num_tokens)
        self.restart(output)

    def suspect(self, request: Request, num_tokens: int) -> None:
        """Have a request run alone until so many of its tokens are computed."""
        request.alone_until = num_tokens
        self._has_suspects = True

    def restart(self, output: SchedulerOutput) -> None:
        """After a step that did not run: its requests begin anew."""
        for item in output.scheduled:
            self._release_items(item.request)
            self._running.remove(item.request)
            self._kv.free(item.request.request_id)
            self._queue_anew(item.request)

    def stop_swapping(self) -> None:
        """Swap nobody out any more; who is out comes back."""
        self._swaps_out = False

    def undo_swaps(self, output: SchedulerOutput) -> None:
        """After a step that failed: nobody knows which pages were copied.

        Requests that the step swapped out, or in without running them, are recomputed instead.
        """
        for request in output.restored:
            self._running.remove(request)
            self._kv.free(request.request_id)
            self._queue_anew(request)
        for request in output.preempted:
            if self._swap is not None and request.status is RequestStatus.SWAPPED:
                self._swap.free(request.request_id)
                self._swapped.remove(request)
                self._queue_anew(request)

    def complete(self, output: SchedulerOutput) -> None:
        """Record that a step has run and its rows are written; publish what became full."""
        for item in output.scheduled:
            request = item.request
            full_before = request.num_computed_tokens // self._block_size
            request.num_computed_tokens += item.num_tokens
            if not request.is_suspect:
                request.alone_until = 0
            self._release_items(request, passed_only=True)
            if not self._kv.enable_prefix_caching:
                continue
            if item.runs_encoder and request.encoder_blocks is not None:
                self._kv.publish_encoder(request.request_id, request.encoder_blocks)
            if request.num_computed_tokens // self._block_size > full_before:
                request.extend_hashes(self._block_size)
                self._kv.publish(
                    request.request_id, request.block_hashes, request.num_computed_tokens
                )

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is, and give back what it holds."""
        self._release_items(request)
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._kv.free(request.request_id)
        elif request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        elif request.status is RequestStatus.SWAPPED and self._swap is not None:
            self._swapped.remove(request)
            self._swap.free(request.request_id)
        request.status = RequestStatus.FINISHED
