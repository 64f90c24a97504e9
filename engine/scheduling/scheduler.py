"""Scheduler: chooses for each step which requests run how many tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter

from engine.interface.log_fields import package_logger
from engine.requests.encoder_input import MultiModalInput
from engine.requests.request import Request, RequestStatus
from engine.scheduling.request_queues import (
    EncoderCacheManager,
    EncodingBudget,
    ItemShare,
    RequestQueues,
)
from prefix_cache import CachedPrefix, KVCacheManager, OffloadedBlocks, PageCopy, SwapSpace


@dataclass(frozen=True, slots=True)
class PageMove:
    """Copies of one request's pages, to the host or from the host to the device."""

    copies: tuple[PageCopy, ...]
    to_host: bool


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step: the ``num_tokens`` after its computed ones.

    Attributes:
        request: the request; its ``num_computed_tokens`` does not include this step yet.
        runs_encoder: true if the request's encoder input is encoded in this step.
        items_to_encode: its multimodal items that towers encode in this step.
    """

    request: Request
    num_tokens: int
    runs_encoder: bool = False
    items_to_encode: tuple[MultiModalInput, ...] = ()

    @property
    def samples(self) -> bool:
        """True if this step computes the newest token and samples the next one."""
        request = self.request
        stop = request.num_computed_tokens + self.num_tokens
        return stop == len(request.token_ids) < request.max_num_tokens


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """Scheduling decisions for one step.

    Attributes:
        scheduled: requests with their numbers of tokens, in order of these numbers.
        preempted: requests whose blocks were freed to make room.
        page_moves: copies to make before anything is written, in this order: each may overwrite
            the source of an earlier one, on the device and on the host.
        restored: requests that are swapped in, but run in a later step.
    """

    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[Request, ...]
    page_moves: tuple[PageMove, ...] = ()
    restored: tuple[Request, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Total number of tokens in the step."""
        return sum(item.num_tokens for item in self.scheduled)

    def without(self, failed: Collection[Request]) -> SchedulerOutput:
        """Return the step without requests that failed in it, so that they are not completed."""
        sound = (item for item in self.scheduled if item.request not in failed)
        return replace(self, scheduled=tuple(sound))


@dataclass(slots=True)
class StepPlan:
    """Builder of one step; see :class:`SchedulerOutput`."""

    num_tokens: int
    encoding_budget: EncodingBudget
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    page_moves: list[PageMove] = field(default_factory=list)
    restored: list[Request] = field(default_factory=list)

    def add(self, request: Request, share: ItemShare, *, runs_encoder: bool = False) -> None:
        """Add a request's share to the step."""
        self.scheduled.append(
            ScheduledRequest(request, share.num_tokens, runs_encoder, share.to_encode)
        )
        self.num_tokens -= share.num_tokens
        self.encoding_budget = share.budget
        if runs_encoder and request.encoder_blocks:
            self.encoding_budget = share.budget.less(request.num_encoder_tokens)

    def output(self) -> SchedulerOutput:
        """Return the finished step, smallest shares first."""
        return SchedulerOutput(
            tuple(sorted(self.scheduled, key=attrgetter("num_tokens"))),
            tuple(self.preempted),
            tuple(self.page_moves),
            tuple(self.restored),
        )


@dataclass(slots=True)
class Admission:
    """Admission of requests in order, while a step has tokens, seats and blocks for them.

    Attributes:
        max_num_seqs: maximum number of running requests, including paused ones that hold blocks.
        num_preemptions: number of preemptions so far.
    """

    kv_cache_manager: KVCacheManager
    queues: RequestQueues
    block_size: int
    max_num_seqs: int
    offloaded: OffloadedBlocks | None = None
    num_preemptions: int = 0

    def preempt(self, victim: Request, step: StepPlan) -> None:
        """Free the blocks of a running or paused request."""
        self.num_preemptions += 1
        step.preempted.append(victim)
        if copies := self.queues.preempt(victim):
            step.page_moves.append(PageMove(copies, to_host=True))

    @property
    def may_have_seat(self) -> bool:
        """True if one more request can run, possibly by preempting a paused one."""
        return len(self.queues.running) < self.max_num_seqs

    def _take_seat(self, step: StepPlan) -> None:
        """Free a seat by preempting a paused request if necessary; see :attr:`may_have_seat`."""
        if self.queues.num_running == self.max_num_seqs:
            self.preempt(self.queues.holders[-1], step)

    def swap_in(self, step: StepPlan) -> None:
        """Swap requests in, in order, before any new one is admitted."""
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
            num_tokens = self.queues.chunk(request, step.num_tokens)
            share = self.queues.hold_items(request, num_tokens, step.encoding_budget)
            if share.num_tokens and not self.queues.grow(request, share.num_tokens):
                # It would be preempted again at once, so recompute it later instead.
                self.queues.restart(request)
                continue
            step.page_moves.append(PageMove(copies, to_host=False))
            if share.num_tokens:
                step.add(request, share)
            else:  # it waits for an item, because others have used up the encoding budget
                step.restored.append(request)
                self.queues.release_items(request)

    def admit_waiting(self, step: StepPlan) -> None:
        """Admit waiting requests in order, up to the first one that could run but does not fit."""
        waiting = self.queues.waiting
        while step.num_tokens and self.may_have_seat:
            request = waiting.first()
            if request is None:
                break
            prefix = self._find_prefix(request)
            if prefix.in_flight:
                self._skip_same_wait(request, prefix)
            elif not request.can_run_from(prefix.num_tokens):
                self.queues.rest(request)  # until more of its input arrives
            elif request.is_isolated or not self._try_admit(request, prefix, step):
                break  # an isolated request runs before later ones, in a separate step
        waiting.reopen()

    def _skip_same_wait(self, request: Request, prefix: CachedPrefix) -> None:
        """Skip all waiting requests that wait for the same block as this one.

        They share the prefix up to the block in flight. If some layers lack an earlier block than
        others, a request whose next block is cached as well may start after it.
        """
        waiting, kv = self.queues.waiting, self.kv_cache_manager
        encoder = request.encoder_blocks
        if encoder is not None and not prefix.encoder_cached and encoder.hashes[0] in kv.pending:
            waiting.skip_prefix(request, 1)
            return
        num_before = 0 if encoder is None else 1
        num_hit = prefix.num_tokens // self.block_size
        usable = request.block_hashes[: (request.num_tokens - 1) // self.block_size]
        num_found = num_hit + kv.outputs.num_blocks_found(usable[num_hit:])
        if num_found == num_hit:
            waiting.skip_prefix(request, num_before + num_hit + 1)
        else:
            waiting.skip_prefix(request, num_before + num_found, kv.outputs.blocks_found)

    def _find_prefix(self, request: Request, *, whole_blocks: bool = False) -> CachedPrefix:
        """Find the cached prefix of a waiting request."""
        if self.kv_cache_manager.enable_prefix_caching:
            request.extend_hashes(self.block_size)
        return self.kv_cache_manager.find_cached_prefix(
            request.block_hashes,
            request.num_tokens,
            request.encoder_blocks,
            None if whole_blocks else partial(request.partial_hash, self.block_size),
        )

    def consider(self, request: Request, step: StepPlan) -> bool:
        """Admit a waiting request if it can run; return True if later ones may be considered."""
        prefix = self._find_prefix(request)
        if prefix.in_flight or not request.can_run_from(prefix.num_tokens):
            return True
        return self._try_admit(request, prefix, step)

    def _try_admit(self, request: Request, prefix: CachedPrefix, step: StepPlan) -> bool:
        """Admit a waiting request if there are a seat and blocks; return True if admitted."""
        prefix = self._fetch(request, prefix, step)
        fits = prefix.encoder_cached or step.encoding_budget.allows(request.num_encoder_tokens)
        if not fits or not self._first_chunk(request, prefix, step):
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
        # It fits into an empty pool, but not together with its own cached prefix.
        self.kv_cache_manager.reset_prefix_cache()
        return self._admit(request, self._find_prefix(request), step)

    def _fetch(self, request: Request, prefix: CachedPrefix, step: StepPlan) -> CachedPrefix:
        """Find a longer prefix by loading blocks that the pool has evicted.

        Not in a step that moves pages: fetched blocks are written immediately, but pages that
        requests have released may still have to be copied.
        """
        if self.offloaded is None or step.page_moves or prefix.miss == "off":
            return prefix
        is_fetched = self.offloaded.fetch(
            prefix,
            request.block_hashes,
            request.num_tokens,
            request.encoder_blocks,
            headroom=len(self.queues.running),
        )
        return self._find_prefix(request) if is_fetched else prefix

    def _admit(self, request: Request, prefix: CachedPrefix, step: StepPlan) -> bool:
        """Admit a request if all its tokens fit and leave one block for each running request.

        Otherwise it would be preempted right away. A partial block is not used if the request would
        not fit with it, nor in a step that moves pages: it is copied immediately, but pages that
        requests have released may still have to be copied.
        """
        can_finish = self._can_finish(request, prefix)
        if prefix.partial is not None and (step.page_moves or not can_finish):
            prefix = self._find_prefix(request, whole_blocks=True)
            can_finish = self._can_finish(request, prefix)
        if not can_finish:
            return False
        num_tokens = self._first_chunk(request, prefix, step)
        share = self.queues.hold_items(request, num_tokens, step.encoding_budget, prefix)
        if not share.num_tokens:
            return False
        if not self.kv_cache_manager.allocate_slots(
            request.request_id,
            prefix.num_tokens + share.num_tokens,
            num_computed_tokens=prefix.num_tokens,
            encoder=request.encoder_blocks,
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
            if request.prefix_miss is not None:
                self.kv_cache_manager.count_miss(request.prefix_miss, prefix.lacking_group)
        step.add(request, share, runs_encoder=not prefix.encoder_cached)
        return True

    def _first_chunk(self, request: Request, prefix: CachedPrefix, step: StepPlan) -> int:
        """Return how many tokens a request would run first; 0 if its item does not fit the step."""
        num_tokens = min(request.num_known_tokens - prefix.num_tokens, step.num_tokens)
        if prefix.stops is not None:
            num_tokens = prefix.stops.clip(prefix.num_tokens, num_tokens, request.num_tokens)
        request.num_computed_tokens = prefix.num_tokens
        return request.clip_chunk(num_tokens)

    def _can_finish(self, request: Request, prefix: CachedPrefix) -> bool:
        return self.kv_cache_manager.can_finish(
            request.num_tokens,
            prefix=prefix,
            num_encoder_tokens=request.num_encoder_tokens,
            headroom=len(self.queues.running),
            num_item_pages=self.queues.largest_item(request, prefix.num_tokens),
        )


logger = package_logger(__name__)


@dataclass(slots=True)
class FaultIsolation:
    """Recovery from failed steps.

    When a step of several requests fails, the error does not identify the request that caused it.
    The requests restart, as after a preemption, and are *isolated*: each runs alone until it is
    past the tokens of that step. A request that fails alone is the cause, and the others continue
    together. Steps of one isolated request alternate with steps of all others, and a later request
    does not start before an isolated one that could. A fault that occurs only when several requests
    run together repeats for all of them, but fails none of them.

    Attributes:
        has_turn: true if the next step belongs to an isolated request, if one can run.
    """

    queues: RequestQueues
    has_turn: bool = True
    _isolated: dict[str, Request] = field(default_factory=dict)

    def isolate(self, request: Request, num_tokens: int) -> None:
        """Make a request run alone until ``num_tokens`` of its tokens are computed."""
        request.alone_until = num_tokens
        self._isolated[request.request_id] = request

    def isolated(self) -> list[Request]:
        """Return the isolated requests that wait or run, in queue order."""
        if not self._isolated:
            return []
        live = (RequestStatus.WAITING, RequestStatus.RUNNING)
        self._isolated = {
            request_id: request
            for request_id, request in self._isolated.items()
            if request.is_isolated and request.status in live
        }
        return sorted(self._isolated.values(), key=attrgetter("queue_key"))

    def clear(self) -> None:
        """Forget all isolated requests, even after an interrupted call."""
        self._isolated = {}

    def recover(self, output: SchedulerOutput, *, swap_failed: bool = False) -> tuple[Request, ...]:
        """Restart the requests of a failed step; return those to fail, because they ran alone.

        It is unknown which pages were copied, so requests that the step swapped out, or swapped in
        without running them, are recomputed.
        """
        swapped = [r for r in output.preempted if r.status is RequestStatus.SWAPPED]
        for request in (*output.restored, *swapped):
            self.queues.restart(request)
        requests = tuple(item.request for item in output.scheduled)
        if swap_failed:
            logger.error("requests that make room are recomputed from now on, not swapped")
            self.queues.swaps_out = False
        elif len(requests) > 1:
            for item in output.scheduled:
                self.isolate(item.request, item.request.num_computed_tokens + item.num_tokens)
        else:
            return requests
        for request in requests:
            self.queues.restart(request)
        return ()


class Scheduler:
    """Continuous batching under a token budget.

    A step serves, in order of ``Request.queue_key``:

    1. every running request: one token if it decodes, else the next chunk of its prompt. A chunk
    leaves one token of budget for each running request after it: a prompt never stalls decoding,
    unless it contains an image that must run whole and exceeds that budget;
    2. requests that were swapped out, before any new one; 3. waiting requests, while budget, seats
    and blocks last.

    When a running request finds no free block, the last running request in the order is preempted:
    its blocks are freed, its tokens are kept, and it waits to be recomputed (or to hit its own
    blocks, if they are still cached). With swap space its pages move to the host instead, if there
    is room, and it continues where it was; after a failed copy, requests are recomputed instead.
    The first request in the order can therefore always finish, because requests that could never
    fit alone are rejected earlier, see :mod:`engine.inputs.prompt_tokens`.

    Items to encode, such as images, clip chunks: a chunk ends before an item for which the encoding
    budget or the pool has no room in this step. Empty chunks are omitted.

    A waiting request whose next uncached block is being computed by a running request waits for
    that block to be published instead of computing it again. All requests with the same prefix up
    to that block are skipped together, so a longer queue does not make a step more expensive.

    An idle request, which is paused or whose next row has not arrived, keeps what it holds, is left
    out of steps, and may be preempted like any other. Requests after it are served meanwhile: when
    blocks or seats run short, paused requests are preempted first, the last in the order before
    others.

    Args:
        max_num_encoder_tokens: maximum number of rows that towers, or the encoder of an
            encoder-decoder, compute per step; a longer input runs alone.
        swap_space: swap space for preempted requests; None recomputes them.
        offloaded: blocks in tiers below the pool, or None.
        encoder_cache_manager: manager of rows of multimodal items; None for a model without.

    Attributes:
        fault_isolation: recovery after a failed step.
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
        offloaded: OffloadedBlocks | None = None,
        encoder_cache_manager: EncoderCacheManager | None = None,
    ) -> None:
        self._kv = kv_cache_manager
        self._block_size = block_size
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_encoder_tokens = max_num_encoder_tokens
        self._queues = RequestQueues(kv_cache_manager, swap_space, encoder_cache_manager)
        self._running = self._queues.running
        self._admission = Admission(
            kv_cache_manager, self._queues, block_size, max_num_seqs, offloaded
        )
        self._offloaded = offloaded
        self.fault_isolation = FaultIsolation(self._queues)

    @property
    def num_waiting(self) -> int:
        """Number of queued requests, including swapped and resting ones."""
        return len(self._queues.waiting) + len(self._queues.swapped) + len(self._queues.resting)

    @property
    def num_running(self) -> int:
        """Number of requests that hold blocks."""
        return self._queues.num_running

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions so far."""
        return self._admission.num_preemptions

    @property
    def has_idle_requests(self) -> bool:
        """True if a request waits for its caller to resume it or to send its next row."""
        if self._queues.holders or self._queues.resting:
            return True
        return any(request.is_paused or request.needs_input for request in self._queues)

    def add(self, request: Request) -> None:
        """Queue a validated request."""
        self._queues.add(request)

    def publish_partial(self, request: Request) -> None:
        """Make the partial last block of a running request findable, before it finishes."""
        self._kv.publish_partial(
            request.request_id,
            request.block_hashes,
            partial(request.partial_hash, self._block_size),
            request.num_computed_tokens,
        )

    def finish(self, request: Request) -> None:
        """Remove a request from any queue, and release what it holds."""
        self._queues.finish(request)

    def clear(self) -> None:
        """Forget all requests and what they hold, even after an interrupted call."""
        self._queues.clear()
        self.fault_isolation.clear()

    def pause(self, request: Request) -> None:
        """Exclude a request from steps until it is resumed."""
        request.is_paused = True
        # Other requests must not wait for blocks that it does not compute now.
        self._kv.pending.drop_request(request.request_id)
        self._queues.rest(request)

    def resume(self, request: Request) -> None:
        """Resume a paused request."""
        request.is_paused = False
        self._queues.wake(request)

    def wake(self, requests: Iterable[Request]) -> None:
        """Reconsider requests whose input has grown; paused ones keep resting."""
        for request in requests:
            self._queues.wake(request)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step, with blocks for all its tokens allocated."""
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
        """Serve all requests except isolated ones."""
        self._schedule_running(step)
        # Admit none after a preemption, lest the two alternate, unless none is left to run.
        if not step.scheduled or all(request.is_paused for request in step.preempted):
            swapped = self._queues.swapped
            if swapped:
                self._admission.swap_in(step)
            if not swapped or not any(r.can_run_from(r.num_computed_tokens) for r in swapped):
                self._admission.admit_waiting(step)

    def _schedule_isolated(self, step: StepPlan) -> None:
        """Give the whole step to the first isolated request that can run."""
        is_blocked = False
        for request in self.fault_isolation.isolated():
            if request.status is RequestStatus.RUNNING:
                self._serve(request, self._queues.chunk(request, step.num_tokens), step)
            elif not is_blocked and self._admission.may_have_seat:
                is_blocked = not self._admission.consider(request, step)
            if step.scheduled:
                return

    def _schedule_running(self, step: StepPlan) -> None:
        num_served = 0
        while num_served < len(self._running):
            request = self._running[num_served]
            num_behind = len(self._running) - num_served - 1
            num_tokens = 0
            if not request.is_isolated:
                num_tokens = self._queues.chunk(request, step.num_tokens - num_behind)
                num_tokens = num_tokens or self._queues.chunk(request, step.num_tokens)
            num_served += self._serve(request, num_tokens, step)

    def _serve(self, request: Request, num_tokens: int, step: StepPlan) -> bool:
        """Hold items and blocks for a running request's next tokens, and add it to the step.

        If there are too few pages, others are preempted. But a request that lacks room for an item
        waits while another one runs, because that one will release its items. Returns False if the
        request itself was preempted.
        """
        share = self._queues.hold_items(request, num_tokens, step.encoding_budget)
        while share.lacks_room and not step.scheduled:
            if not self._preempt_for(request, step):
                return False
            share = self._queues.hold_items(request, num_tokens, step.encoding_budget)
        if not share.num_tokens:
            return True
        while not self._queues.grow(request, share.num_tokens):
            if not self._preempt_for(request, step):
                return False
        step.add(request, share)
        return True

    def _preempt_for(self, request: Request, step: StepPlan) -> bool:
        """Preempt the last request in the order; return False if it was ``request`` itself.

        Victims are never already scheduled, because requests are served in the same order.
        """
        victim = (self._queues.holders or self._running)[-1]
        self._admission.preempt(victim, step)
        if victim is not request:
            return True
        if not self._running:
            # It has the pool to itself, so only cached content scattered over pages is in its way.
            self._kv.reset_prefix_cache()
        return False

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
                if self._offloaded is not None:
                    self._offloaded.store_encoder(request.request_id, request.num_encoder_tokens)
            if request.num_computed_tokens // self._block_size > full_before:
                request.extend_hashes(self._block_size)
                self._kv.publish(
                    request.request_id, request.block_hashes, request.num_computed_tokens
                )
                if self._offloaded is not None:
                    self._offloaded.store(request.request_id, full_before)
