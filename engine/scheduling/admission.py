"""Who may run besides those that run: seats and blocks for swapped and waiting requests."""

from __future__ import annotations

from dataclasses import dataclass

from engine.requests.request import Request
from engine.scheduling.encoder_cache_manager import ItemShare
from engine.scheduling.request_queues import RequestQueues
from engine.scheduling.scheduler_output import PageMove, StepPlan
from prefix_cache import CachedPrefix, KVCacheManager

__all__ = ["Admission"]


@dataclass(slots=True)
class Admission:
    """Lets requests in, in their order, as long as a step has tokens, seats and blocks for them.

    Attributes:
        kv_cache_manager: owns the blocks.
        queues: where the requests stand.
        block_size: tokens per block.
        max_num_seqs: requests that run at once, paused ones that hold blocks included.
        num_preemptions: how often a request had to give its blocks back.
    """

    kv_cache_manager: KVCacheManager
    queues: RequestQueues
    block_size: int
    max_num_seqs: int
    num_preemptions: int = 0

    def preempt(self, victim: Request, step: StepPlan) -> None:
        """Take back the blocks of a running or paused request."""
        self.num_preemptions += 1
        step.preempted.append(victim)
        if copies := self.queues.preempt(victim):
            step.page_moves.append(PageMove(copies, to_host=True))

    @property
    def may_have_seat(self) -> bool:
        """Whether one more request can run, if a paused one gives up its seat for it."""
        return len(self.queues.running) < self.max_num_seqs

    def _take_seat(self, step: StepPlan) -> None:
        """See to it that a seat is free; :attr:`may_have_seat`."""
        if self.queues.num_running == self.max_num_seqs:
            self.preempt(self.queues.holders[-1], step)

    def swap_in(self, step: StepPlan) -> None:
        """Bring swapped requests back, in order, before any new one is let in."""
        for request in tuple(self.queues.swapped):
            if not step.num_tokens or not self.may_have_seat:
                return
            if not request.can_run_from(request.num_computed_tokens):
                self.queues.rest(request)
                continue
            self._take_seat(step)
            while (copies := self.queues.swap_in(request)) is None:
                if not self.queues.holders:
                    return
                self.preempt(self.queues.holders[-1], step)
            share = self._share(request, self.queues.chunk(request, step.num_tokens), step)
            if share.num_tokens and not self.queues.grow(request, share.num_tokens):
                # It would go out again at once; its pages are better made anew later.
                self.queues.begin_anew(request)
                continue
            step.page_moves.append(PageMove(copies, to_host=False))
            if share.num_tokens:
                step.add(request, share)
            else:  # it waits for an image, for which others have used up the budget
                step.restored.append(request)
                self.queues.release_items(request)

    def admit_waiting(self, step: StepPlan) -> None:
        """Let waiting requests in, in order, up to the first that could run and finds no room."""
        waiting = self.queues.waiting
        while step.num_tokens and self.may_have_seat:
            request = waiting.first()
            if request is None:
                break
            prefix = self._find_prefix(request)
            if prefix.in_flight:
                self._pass_over_alike(request, prefix)
            elif not request.can_run_from(prefix.num_tokens):
                self.queues.rest(request)  # until more of it is known
            elif request.is_isolated or not self._let_in(request, prefix, step):
                break  # one that is isolated comes before those behind it, in a step of its own
        waiting.reopen()

    def _pass_over_alike(self, request: Request, prefix: CachedPrefix) -> None:
        """Pass over all waiting requests that wait for the same as this one.

        They begin alike up to the block that is in flight. Where some layers lack an earlier block
        than others, a request may begin behind it: one whose next block is there as well.
        """
        waiting, kv = self.queues.waiting, self.kv_cache_manager
        encoder = request.encoder_blocks
        if encoder is not None and not prefix.encoder_cached and encoder.hashes[0] in kv.pending:
            waiting.pass_over_alike(request, 1)
            return
        num_before = 0 if encoder is None else 1
        num_hit = prefix.num_tokens // self.block_size
        usable = request.block_hashes[: (request.num_tokens - 1) // self.block_size]
        num_found = num_hit + kv.outputs.num_blocks_found(usable[num_hit:])
        if num_found == num_hit:
            waiting.pass_over_alike(request, num_before + num_hit + 1)
        else:
            waiting.pass_over_alike(request, num_before + num_found, kv.outputs.blocks_found)

    def _share(self, request: Request, num_tokens: int, step: StepPlan) -> ItemShare:
        return self.queues.hold_items(request, num_tokens, step.encoding_budget)

    def _find_prefix(self, request: Request) -> CachedPrefix:
        """What a waiting request would begin with."""
        if self.kv_cache_manager.enable_prefix_caching:
            request.extend_hashes(self.block_size)
        return self.kv_cache_manager.find_cached_prefix(
            request.block_hashes, request.num_tokens, request.encoder_blocks
        )

    def consider(self, request: Request, step: StepPlan) -> bool:
        """Let a waiting request in if it can run now; whether those behind it may be considered."""
        prefix = self._find_prefix(request)
        if prefix.in_flight or not request.can_run_from(prefix.num_tokens):
            return True
        return self._let_in(request, prefix, step)

    def _let_in(self, request: Request, prefix: CachedPrefix, step: StepPlan) -> bool:
        """Let a waiting request run, if it is given a seat and blocks."""
        if not step.has_room_to_encode(request, prefix):
            return False
        self._take_seat(step)
        while not self._admit(request, prefix, step):
            if not self.queues.holders or not step.encoding_budget.is_untouched:
                break
            self.preempt(self.queues.holders[-1], step)
            prefix = self._find_prefix(request)
        else:
            return True
        if self.queues.num_running:
            return False
        # It fits into an empty pool, but not beside the content that it would build on.
        self.kv_cache_manager.reset_prefix_cache()
        return self._admit(request, self._find_prefix(request), step)

    def _admit(self, request: Request, prefix: CachedPrefix, step: StepPlan) -> bool:
        """Let a request in if all of its tokens fit, and a block stays for each running request.

        Otherwise it would be preempted right away.
        """
        encoder = request.encoder_blocks
        if not self.kv_cache_manager.can_finish(
            request.num_tokens,
            prefix=prefix,
            num_encoder_tokens=encoder.num_tokens if encoder is not None else 0,
            headroom=len(self.queues.running),
        ):
            return False
        num_tokens = min(request.num_known_tokens - prefix.num_tokens, step.num_tokens)
        if prefix.stops is not None:
            num_tokens = prefix.stops.clip(prefix.num_tokens, num_tokens, request.num_tokens)
        request.num_computed_tokens = prefix.num_tokens
        share = self._share(request, request.clip_to_view(num_tokens), step)
        if not share.num_tokens:
            return False
        if not self.kv_cache_manager.allocate_slots(
            request.request_id,
            prefix.num_tokens + share.num_tokens,
            num_computed_tokens=prefix.num_tokens,
            encoder=encoder,
            prefix=prefix,
            block_hashes=request.block_hashes,
        ):
            self.queues.release_items(request)
            return False
        self.queues.start(request)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = prefix.num_tokens
            is_salted = request.cache_salt is not None and not prefix.num_tokens
            request.prefix_miss = "salt" if is_salted and prefix.miss == "unseen" else prefix.miss
        step.add(request, share, runs_encoder=not prefix.encoder_cached)
        return True
