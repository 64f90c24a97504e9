"""Where live requests stand, and what they hold there."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.requests.request import Request, RequestStatus
from engine.scheduling.encoder_cache_manager import (
    EncoderCacheManager,
    EncodingBudget,
    ItemShare,
)
from engine.scheduling.waiting_queue import WaitingQueue
from prefix_cache import BlockHash, KVCacheManager, PageCopy, SwapSpace

__all__ = ["RequestQueues"]


@dataclass(slots=True)
class RequestQueues:
    """The waiting, running and swapped requests, each queue in order of ``Request.queue_key``. ::

        add ──► waiting ──── start ────► running ──► finish
                   ▲                     │  │  ▲
                   ├──── begin_anew ─────┘  │  │ swap_in
                   │                preempt ▼  │
                   └──── begin_anew ──────  swapped

    A running request holds blocks and rows of the encoder cache, a swapped one pages of the host,
    a waiting one nothing. One that cannot go on rests where it is, beside its queue, until it can:
    ``rest`` and ``wake``. So the queues hold what a step may have to look at, and no more.

    Attributes:
        kv_cache_manager: owns the blocks.
        swap_space: where preempted requests go; None recomputes them.
        encoder_cache_manager: holds the rows of images and the like; None for a model that takes
            none.
        waiting: requests that have to be computed from the start, or from a cached prefix.
        running: requests that go on where they are.
        swapped: requests that go on where they were as soon as their pages are back.
        holders: paused requests that hold blocks, in order; the last is the first to be preempted.
        resting: waiting and swapped requests that have nothing to run, by id.
        swaps_out: whether preempted requests go to the swap space, if there is one.
    """

    kv_cache_manager: KVCacheManager
    swap_space: SwapSpace | None
    encoder_cache_manager: EncoderCacheManager | None
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    running: list[Request] = field(default_factory=list)
    swapped: list[Request] = field(default_factory=list)
    holders: list[Request] = field(default_factory=list)
    resting: dict[str, Request] = field(default_factory=dict)
    swaps_out: bool = True

    def __iter__(self) -> Iterator[Request]:
        yield from self.running
        yield from self.swapped
        yield from self.waiting
        yield from self.holders
        yield from self.resting.values()

    @property
    def num_running(self) -> int:
        """Requests that hold blocks, paused ones included."""
        return len(self.running) + len(self.holders)

    def add(self, request: Request) -> None:
        """Queue a request that has been validated."""
        if request.is_paused:
            self.resting[request.request_id] = request
            return
        if self.kv_cache_manager.enable_prefix_caching:
            request.extend_hashes(self.kv_cache_manager.block_size)
        self.waiting.add(request, self._hashes_to_find(request))

    def _hashes_to_find(self, request: Request) -> Sequence[BlockHash]:
        """What says which waiting requests begin alike: the encoder's input, then the blocks."""
        if not self.kv_cache_manager.enable_prefix_caching:
            return ()
        usable = (request.num_tokens - 1) // self.kv_cache_manager.block_size
        hashes = tuple(request.block_hashes[:usable])
        encoder = request.encoder_blocks
        return hashes if encoder is None else (*encoder.hashes[:1], *hashes)

    def clear(self) -> None:
        """Forget every request and all that is held, whatever an interrupted call left of it."""
        self.waiting = WaitingQueue()
        for queue in (self.running, self.swapped, self.holders, self.resting):
            queue.clear()
        self.kv_cache_manager.clear()
        if self.swap_space is not None:
            self.swap_space.clear()
        if self.encoder_cache_manager is not None:
            self.encoder_cache_manager.clear()

    def rest(self, request: Request) -> None:
        """Leave a request out of its queue, with what it holds, until it is woken.

        A running one is only if it is paused: one that lacks a row is soon to go on.
        """
        if request.request_id in self.resting:
            return
        if request.status is RequestStatus.RUNNING:
            if request.is_paused and _remove(self.running, request):
                _insert(self.holders, request)
        elif request.status is RequestStatus.SWAPPED:
            _remove(self.swapped, request)
            self.resting[request.request_id] = request
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
            self.resting[request.request_id] = request

    def wake(self, request: Request) -> None:
        """Put a request back into its queue, if it rests and is not paused."""
        if request.is_paused:
            return
        if _remove(self.holders, request):
            _insert(self.running, request)
        elif self.resting.pop(request.request_id, None) is not None:
            if request.status is RequestStatus.SWAPPED:
                _insert(self.swapped, request)
            else:
                self.add(request)

    def start(self, request: Request) -> None:
        """Let a waiting request run; its blocks have been allocated."""
        self.waiting.remove(request)
        self._run(request)

    def swap_in(self, request: Request) -> tuple[PageCopy, ...] | None:
        """Let a swapped request run, if its pages find room beside one for each running request.

        Returns:
            The copies that bring its pages back; None if there is no room.
        """
        if self.swap_space is None:
            return None
        headroom = len(self.running)  # those that rest do not grow
        copies = self.swap_space.swap_in(
            request.request_id, request.block_hashes, headroom=headroom
        )
        if copies is not None:
            _remove(self.swapped, request)
            self._run(request)
        return copies

    def preempt(self, request: Request) -> tuple[PageCopy, ...]:
        """Take a running request's blocks; returns the copies that save its pages, if they are.

        A request that is isolated after a fault is always recomputed.
        """
        request.num_preemptions += 1
        if self.swap_space is not None and self.swaps_out and not request.is_isolated:
            copies = self.swap_space.swap_out(request.request_id, request.num_computed_tokens)
            if copies is not None:
                _remove(self.running, request)
                self.release_items(request)
                request.status = RequestStatus.SWAPPED
                if _remove(self.holders, request):
                    self.resting[request.request_id] = request
                else:
                    _insert(self.swapped, request)
                return copies
        self.begin_anew(request)
        return ()

    def begin_anew(self, request: Request) -> None:
        """Let a request wait to be recomputed, from the start or from its own cached blocks."""
        self._take_out(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        self.add(request)

    def finish(self, request: Request) -> None:
        """Take a request out for good, wherever it is."""
        self._take_out(request)
        request.status = RequestStatus.FINISHED

    def chunk(self, request: Request, budget: int) -> int:
        """How many of a running request's tokens to run; none while it is idle."""
        if not request.can_run_from(request.num_computed_tokens):
            return 0
        num_tokens = self.kv_cache_manager.clip_chunk(
            request.request_id,
            request.num_computed_tokens,
            min(request.num_known_tokens - request.num_computed_tokens, budget),
            request.num_tokens,
        )
        return request.clip_to_view(num_tokens)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Get blocks for a running request's next tokens; False if too few are free."""
        return self.kv_cache_manager.allocate_slots(
            request.request_id,
            request.num_computed_tokens + num_tokens,
            num_computed_tokens=request.num_computed_tokens,
            encoder=request.encoder_blocks,
        )

    def hold_items(self, request: Request, num_tokens: int, budget: EncodingBudget) -> ItemShare:
        """Cut a chunk to the images and the like whose rows it can have, and hold these."""
        if self.encoder_cache_manager is None or not request.multimodal_inputs:
            return ItemShare(num_tokens, (), budget)
        return self.encoder_cache_manager.take(request, num_tokens, budget)

    def release_items(self, request: Request, *, passed_only: bool = False) -> None:
        """Give back the rows that a request holds, or those of items that it has computed."""
        manager = self.encoder_cache_manager
        if manager is None or not request.multimodal_inputs:
            return
        if passed_only:
            manager.release_passed(request)
        else:
            manager.release(request)
        if not self.kv_cache_manager.enable_prefix_caching:
            manager.cache.reset()

    def _run(self, request: Request) -> None:
        _insert(self.running, request)
        request.status = RequestStatus.RUNNING

    def _take_out(self, request: Request) -> None:
        """Take a request out of its queue, and give back what it holds."""
        self.release_items(request)
        is_resting = self.resting.pop(request.request_id, None) is not None
        if request.status is RequestStatus.RUNNING:
            if not _remove(self.running, request):
                _remove(self.holders, request)
            self.kv_cache_manager.free(request.request_id)
        elif request.status is RequestStatus.WAITING and not is_resting:
            self.waiting.remove(request)
        elif request.status is RequestStatus.SWAPPED and self.swap_space is not None:
            _remove(self.swapped, request)
            self.swap_space.free(request.request_id)


def _insert(queue: list[Request], request: Request) -> None:
    insort(queue, request, key=lambda r: r.queue_key)


def _remove(queue: list[Request], request: Request) -> bool:
    """Take a request out; False if it is not there."""
    index = bisect_left(queue, request.queue_key, key=lambda r: r.queue_key)
    while index < len(queue) and queue[index].queue_key == request.queue_key:
        if queue[index] is request:
            del queue[index]
            return True
        index += 1
    return False
