"""Where live requests stand, and what they hold there."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.requests.request import Request, RequestStatus
from engine.scheduling.encoder_cache_manager import (
    EncoderCacheManager,
    EncodingBudget,
    ItemShare,
)
from prefix_cache import KVCacheManager, PageCopy, SwapSpace

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
    a waiting one nothing.

    Attributes:
        kv_cache_manager: owns the blocks.
        swap_space: where preempted requests go; None recomputes them.
        encoder_cache_manager: holds the rows of images and the like; None for a model that takes
            none.
        waiting: requests that have to be computed from the start, or from a cached prefix.
        running: requests that go on where they are.
        swapped: requests that go on where they were as soon as their pages are back.
        swaps_out: whether preempted requests go to the swap space, if there is one.
    """

    kv_cache_manager: KVCacheManager
    swap_space: SwapSpace | None
    encoder_cache_manager: EncoderCacheManager | None
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    swapped: list[Request] = field(default_factory=list)
    swaps_out: bool = True

    def __iter__(self) -> Iterator[Request]:
        yield from self.waiting
        yield from self.running
        yield from self.swapped

    def add(self, request: Request) -> None:
        """Queue a request that has been validated."""
        _insert(self.waiting, request)

    def clear(self) -> None:
        """Forget every request and all that is held, whatever an interrupted call left of it."""
        for queue in (self.waiting, self.running, self.swapped):
            queue.clear()
        self.kv_cache_manager.clear()
        if self.swap_space is not None:
            self.swap_space.clear()
        if self.encoder_cache_manager is not None:
            self.encoder_cache_manager.clear()

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
        headroom = len(self.running)
        copies = self.swap_space.swap_in(
            request.request_id, request.block_hashes, headroom=headroom
        )
        if copies is not None:
            self.swapped.remove(request)
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
                self.running.remove(request)
                self.release_items(request)
                request.status = RequestStatus.SWAPPED
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
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.kv_cache_manager.free(request.request_id)
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        elif request.status is RequestStatus.SWAPPED and self.swap_space is not None:
            self.swapped.remove(request)
            self.swap_space.free(request.request_id)


def _insert(queue: list[Request], request: Request) -> None:
    insort(queue, request, key=lambda r: r.queue_key)
