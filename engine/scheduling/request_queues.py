"""Queues of live requests, and the resources that requests hold.

The waiting queue is ordered, and can skip many requests at once.

Requests that wait for the same block need not be checked one by one. The queue is a tree of their
block hashes, in which requests with a common prefix share a branch, and every branch knows the
first of its requests::

    hashes                              tree                    first of the branch
    r1   a b c d                        a b ── c d ── e   r4    r1
    r2   a b x                           │      └── (r1)        r1
    r3   k                               └──── x  (r2)          r2
    r4   a b c d e                      k  (r3)                 r3

Skipping all that begin with ``a b c`` means closing one branch. Adding, removing or skipping a
request only updates the branches above it, so a longer queue does not make steps more expensive.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import TypeAlias

from torch import Tensor

from engine.requests.encoder_input import MultiModalInput
from engine.requests.request import Request, RequestStatus
from prefix_cache import (
    BlockHash,
    CachedPrefix,
    KVCacheBlock,
    KVCacheManager,
    PageCopy,
    PagedMemory,
    SwapSpace,
    WholeInputCache,
)


@dataclass(frozen=True, slots=True)
class EncodingBudget:
    """Rows that towers or an encoder may still compute in a step; None: no limit."""

    num_tokens: int | None
    is_untouched: bool = True

    def allows(self, num_tokens: int) -> bool:
        """Return True if an input of ``num_tokens`` rows may run; a longer one may run alone."""
        return self.num_tokens is None or num_tokens <= self.num_tokens or self.is_untouched

    def less(self, num_tokens: int) -> EncodingBudget:
        """Return the budget that remains after an input of ``num_tokens`` rows."""
        left = None if self.num_tokens is None else self.num_tokens - num_tokens
        return EncodingBudget(left, is_untouched=False)


@dataclass(frozen=True, slots=True)
class ItemShare:
    """Chunk that is clipped to the items whose rows are available.

    Attributes:
        to_encode: items that towers must encode for the chunk.
        lacks_room: true if the chunk is empty because there is no room for an item.
    """

    num_tokens: int
    to_encode: tuple[MultiModalInput, ...]
    budget: EncodingBudget
    lacks_room: bool = False


class EncoderCacheManager:
    """Manager of tower rows, in pages of the pool, for requests that are computing an item.

    A request holds an item from the step that computes the first placeholder without a prefix hit
    to the step that computes the last one, so an item that a prefix hit covers is never held nor
    encoded. A request that is stopped before an item for which there is no room holds no item.
    Released pages of an item are evicted like any others, and can be found again by content::

        item      |<----- 6 rows ----->|
        step 1    |#########|               held: by every request that has started but not ended it
        step 2              |##########|    released: cached, until others need its pages

    Pieces of an item are held one by one, each as the whole item. If it were held from the first to
    the last piece, a video could wait for room for its audio while holding that room. An item that
    is evicted between two pieces is encoded again.

    Args:
        kv_cache_manager: manager of a config with pages for item rows.
        memory: memory of the pages.
        row: ``(hidden_size,)``, with the dtype of the rows; may be a tensor on ``meta``.

    Attributes:
        num_hits: how often a held item was cached or about to be encoded.
        num_encoded: number of items that towers encoded.
    """

    def __init__(self, kv_cache_manager: KVCacheManager, memory: PagedMemory, row: Tensor) -> None:
        self._kv, self._memory, self._row = kv_cache_manager, memory, row
        self.num_hits = 0
        self.num_encoded = 0
        self.clear()

    def clear(self) -> None:
        """Forget all rows and their holders; the caller clears the pool too."""
        self._held: dict[str, dict[MultiModalInput, list[KVCacheBlock]]] = {}
        # Held pages that the pool cannot find: to be encoded in this step, or not published.
        self._unpublished: dict[bytes, list[KVCacheBlock]] = {}

    def forget(self) -> None:
        """Make everything encoded so far unfindable; current holders keep it."""
        self._unpublished.clear()

    def take(
        self,
        request: Request,
        num_tokens: int,
        budget: EncodingBudget,
        prefix: CachedPrefix | None = None,
    ) -> ItemShare:
        """Hold the items in a request's next ``num_tokens`` tokens, as far as they fit.

        The chunk ends before the first item that is neither cached nor can be encoded. The pages
        of new items fit together with the blocks of the chunk's tokens.

        Args:
            prefix: cached prefix with which a waiting request would start.
        """
        start = request.num_computed_tokens
        stop = start + num_tokens
        to_encode: list[MultiModalInput] = []
        lacks_room = False
        # The request's own prefix must not be evicted to make room for its items.
        tables = (*prefix.blocks, tuple(prefix.sources.values())) if prefix is not None else ()
        adopted = [b for table in tables for b in reversed(table) if b.large_page is not None]
        self._rows.hold(adopted)
        for item in request.multimodal_inputs:
            held = self._held.get(request.request_id, {})
            if not item.overlaps(start, stop) or item in held:
                continue
            same = (x for other, x in held.items() if other.content_hash == item.content_hash)
            if (blocks := next(same, None)) is not None:  # another piece, or the same item again
                held[item] = blocks
                continue
            blocks = self._find(item)
            num_pages = self._num_pages(item) if blocks is None else 0
            needs = self._needs(request, stop, prefix)
            lacks_room = not self._rows.has_room(num_pages, others=needs)
            if lacks_room or (blocks is None and not budget.allows(item.num_rows)):
                if blocks is not None:
                    self._release(item, blocks)
                stop = max(start, item.offset)
                break
            if blocks is None:
                blocks = self._rows.allocate(self._nbytes(item), keep=needs)
                self._unpublished[item.content_hash] = blocks
                to_encode.append(item)
                budget = budget.less(item.num_rows)
            else:
                self.num_hits += 1
            self._held.setdefault(request.request_id, {})[item] = blocks
        for block in adopted:
            self._kv.pool.release([block], block.key[0])
        return ItemShare(stop - start, tuple(to_encode), budget, lacks_room and stop == start)

    def largest_item(self, request: Request, num_computed_tokens: int) -> int:
        """Return the number of pages of the largest item that a request must still hold."""
        items = (x for x in request.multimodal_inputs if x.end > num_computed_tokens)
        return max(map(self._num_pages, items), default=0)

    def fill(self, item: MultiModalInput, rows: Tensor) -> None:
        """Store the tower's output for a held item, and make it findable.

        Raises:
            ValueError: if no pages wait for it, or the rows have an unexpected shape or dtype.
        """
        blocks = self._unpublished.get(item.content_hash)
        if blocks is None:
            raise ValueError("the item has its rows already, or no request holds it")
        shape = item.num_rows, item.row_parts * len(self._row)
        if rows.shape != shape or rows.dtype != self._row.dtype:
            raise ValueError(
                f"the tower gave {rows.dtype} rows of shape {tuple(rows.shape)}, expected were "
                f"{self._row.dtype} of {shape}"
            )
        self._memory.write_rows([block.block_id for block in blocks], rows)
        self.num_encoded += 1
        if self._kv.enable_prefix_caching:
            self._rows.publish(BlockHash(item.content_hash), rows.nbytes, blocks)
            del self._unpublished[item.content_hash]

    def rows(self, request_id: str, item: MultiModalInput, wanted: slice) -> Tensor:
        """Copy the wanted rows of an item that a request holds."""
        block_ids = [block.block_id for block in self._held[request_id][item]]
        width = item.row_parts * len(self._row)
        return self._memory.read_rows(block_ids, wanted, width, self._row.dtype)

    def release(self, request: Request, *, passed_only: bool = False) -> None:
        """Release the items that a request holds, or only those that are fully computed."""
        held = self._held.get(request.request_id, {})
        for item in list(held):
            if not passed_only or item.end <= request.num_computed_tokens:
                blocks = held.pop(item)
                if not any(other is blocks for other in held.values()):
                    self._release(item, blocks)
        if not held:
            self._held.pop(request.request_id, None)

    def tables(self) -> list[list[KVCacheBlock]]:
        """Return the pages of each held item, for integrity checks."""
        return [
            blocks
            for held in self._held.values()
            for blocks in {id(blocks): blocks for blocks in held.values()}.values()
        ]

    @property
    def _rows(self) -> WholeInputCache:
        assert self._kv.item_rows is not None
        return self._kv.item_rows

    def _nbytes(self, item: MultiModalInput) -> int:
        return item.num_rows * item.row_parts * self._row.nbytes

    def _num_pages(self, item: MultiModalInput) -> int:
        return self._rows.num_blocks_for(self._nbytes(item))

    def _find(self, item: MultiModalInput) -> list[KVCacheBlock] | None:
        """Find and hold an item that is cached or about to be encoded."""
        blocks = self._unpublished.get(item.content_hash)
        if blocks is None:
            return self._rows.find(BlockHash(item.content_hash), self._nbytes(item))
        self._rows.hold(blocks)
        return blocks

    def _needs(self, request: Request, stop: int, prefix: CachedPrefix | None) -> dict[int, int]:
        """Return how many blocks of each group a request lacks for its tokens before ``stop``."""
        return self._kv.coordinator.needs(
            request.request_id,
            stop,
            prefix.blocks if prefix is not None else (),
            sources=prefix.sources if prefix is not None else {},
            num_computed_tokens=request.num_computed_tokens,
            num_encoder_tokens=request.num_encoder_tokens,
        )

    def _release(self, item: MultiModalInput, blocks: Sequence[KVCacheBlock]) -> None:
        self._rows.release(blocks)
        if not blocks[0].ref_cnt and self._unpublished.get(item.content_hash) == blocks:
            del self._unpublished[item.content_hash]


Key: TypeAlias = tuple[int, int]
_Entry: TypeAlias = "tuple[Key, int, Request | _Branch]"

_ChildFilter: TypeAlias = Callable[[Set[BlockHash]], Set[BlockHash]]

_MIN_STALE = 16
_BY_KEY = attrgetter("queue_key")


@dataclass(slots=True, eq=False)
class _Branch:
    """Requests with a common prefix of hashes.

    Attributes:
        parent: parent branch; None for the root, and for a removed branch.
        hashes: hashes of any of its requests; the first ``depth`` are common to all.
        children: branches that continue from here, by the next hash.
        num_own: requests without hashes beyond ``depth``.
        heap: own requests and children, each with its key; stale entries stay until they come
            first, or there are many.
        posted: key of the first request here, as in the parent's heap; None: none is open.
        ticket: number of that entry; entries with other numbers are stale.
        exempt: None while it is open. Otherwise everything except these children is skipped.
    """

    parent: _Branch | None
    hashes: Sequence[BlockHash]
    depth: int
    children: dict[BlockHash, _Branch] = field(default_factory=dict)
    num_own: int = 0
    heap: list[_Entry] = field(default_factory=list)
    num_stale: int = 0
    posted: Key | None = None
    ticket: int = -1
    exempt: tuple[_Branch, ...] | None = None


class WaitingQueue:
    """Waiting requests in order of ``Request.queue_key``."""

    def __init__(self) -> None:
        self._root = _Branch(None, (), 0)
        self._locations: dict[str, tuple[_Branch, int, Request]] = {}
        self._closed: list[_Branch] = []
        self._skipped: list[Request] = []
        self._num_tickets = 0

    def __len__(self) -> int:
        return len(self._locations)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all requests, in no particular order."""
        return (request for _, _, request in self._locations.values())

    def add(self, request: Request, hashes: Sequence[BlockHash]) -> None:
        """Add a request.

        Args:
            hashes: hashes of the blocks that it could hit; each covers those before it as well.
        """
        branch = self._root
        while branch.depth < len(hashes):
            child = branch.children.get(hashes[branch.depth])
            if child is None:
                child = _Branch(branch, hashes, len(hashes))
                branch.children[hashes[branch.depth]] = child
            else:
                end = min(child.depth, len(hashes))
                common = _common_length(child.hashes, hashes, branch.depth + 1, end)
                if common < child.depth:
                    child = self._split(child, common)
            branch = child
        branch.num_own += 1
        self._push(branch, request)

    def remove(self, request: Request) -> None:
        """Remove a request. Raises ``KeyError`` if it is not in the queue."""
        branch, _, _ = self._locations.pop(request.request_id)
        branch.num_own -= 1
        self._add_stale(branch)
        self._prune(branch)

    def first(self) -> Request | None:
        """Return the first request that is not skipped, or None."""
        branch = self._root
        while True:
            item = self._first_of(branch)
            if not isinstance(item, _Branch):
                return item
            branch = item

    def skip(self, request: Request) -> None:
        """Skip a request until :meth:`reopen`."""
        branch, _, _ = self._locations[request.request_id]
        self._locations[request.request_id] = (branch, -1, request)
        self._add_stale(branch)
        self._skipped.append(request)
        self._propagate(branch)

    def skip_prefix(
        self, request: Request, num_hashes: int, keep: _ChildFilter | None = None
    ) -> None:
        """Skip all requests with the same leading hashes as ``request`` until :meth:`reopen`.

        Args:
            request: it is skipped in any case.
            num_hashes: number of leading hashes to compare, at least 1.
            keep: selects, from the hashes with which others continue, those not to skip.
        """
        branch, _, _ = self._locations[request.request_id]
        if branch.depth < num_hashes:  # it has more hashes than when it was added
            self.skip(request)
            return
        own_child = branch
        while branch.parent is not None and branch.parent.depth >= num_hashes:
            own_child, branch = branch, branch.parent
        if branch.depth > num_hashes:
            own_child, branch = branch, self._split(branch, num_hashes)
        branch.exempt = ()
        if keep is not None:
            kept = (branch.children[each] for each in keep(branch.children.keys()))
            branch.exempt = tuple(child for child in kept if child is not own_child)
        self._closed.append(branch)
        self._propagate(branch)

    def reopen(self) -> None:
        """Stop skipping requests."""
        closed, self._closed = self._closed, []
        for branch in closed:
            branch.exempt = None
            if branch.parent is not None:
                self._propagate(branch)
                self._prune(branch)
        skipped, self._skipped = self._skipped, []
        for request in skipped:
            if request.request_id in self._locations:
                self._push(self._locations[request.request_id][0], request)

    def _push(self, branch: _Branch, request: Request) -> None:
        self._num_tickets += 1
        self._locations[request.request_id] = (branch, self._num_tickets, request)
        heappush(branch.heap, (request.queue_key, self._num_tickets, request))
        self._propagate(branch)

    def _propagate(self, branch: _Branch) -> None:
        """Propagate the key of the first request here to the branches above."""
        while branch.parent is not None:
            parent, key = branch.parent, self._first_key(branch)
            if key == branch.posted:
                return
            was_posted, branch.posted = branch.posted is not None, key
            self._num_tickets += 1
            branch.ticket = self._num_tickets
            if was_posted:
                self._add_stale(parent)
            if key is not None:
                heappush(parent.heap, (key, branch.ticket, branch))
            branch = parent

    def _first_key(self, branch: _Branch) -> Key | None:
        item = self._first_of(branch)
        if item is None:
            return None
        return item.posted if isinstance(item, _Branch) else item.queue_key

    def _first_of(self, branch: _Branch) -> Request | _Branch | None:
        """Return the first open child or own request of a branch, or None."""
        if branch.exempt is not None:
            opened = [(child.posted, child) for child in branch.exempt if child.posted is not None]
            return min(opened, key=lambda pair: pair[0])[1] if opened else None
        heap = branch.heap
        while heap and not self._is_current(heap[0]):
            heappop(heap)
            branch.num_stale -= 1
        return heap[0][2] if heap else None

    def _add_stale(self, branch: _Branch) -> None:
        """Count a stale entry of a branch's heap; drop stale entries when they are the majority."""
        branch.num_stale += 1
        if branch.num_stale > _MIN_STALE + len(branch.heap) // 2:
            branch.heap = [entry for entry in branch.heap if self._is_current(entry)]
            heapify(branch.heap)
            branch.num_stale = 0

    def _is_current(self, entry: _Entry) -> bool:
        _, ticket, item = entry
        if isinstance(item, _Branch):
            return item.ticket == ticket and item.posted is not None
        location = self._locations.get(item.request_id)
        return location is not None and location[1] == ticket

    def _split(self, branch: _Branch, depth: int) -> _Branch:
        """Insert a new branch of this depth between a branch and its parent."""
        parent = branch.parent
        assert parent is not None
        new = _Branch(parent, branch.hashes, depth)
        self._replace(parent, branch, new)
        self._attach(branch, new)
        return new

    def _prune(self, branch: _Branch) -> None:
        """Remove branches that are empty or have only one child."""
        while (
            branch.parent is not None
            and branch.exempt is None
            and not branch.num_own
            and len(branch.children) < 2
        ):
            parent, only = branch.parent, next(iter(branch.children.values()), None)
            self._replace(parent, branch, only)
            branch.parent = None
            if only is not None:
                self._attach(only, parent)
            branch = parent
        self._propagate(branch)

    def _replace(self, parent: _Branch, old: _Branch, new: _Branch | None) -> None:
        """Replace a child of a parent by another branch, or remove it."""
        key = old.hashes[parent.depth]
        if new is None:
            del parent.children[key]
        else:
            parent.children[key] = new
        if parent.exempt is not None:
            kept = (new if child is old else child for child in parent.exempt)
            parent.exempt = tuple(child for child in kept if child is not None)
        if old.posted is not None:
            old.posted = None
            self._add_stale(parent)

    def _attach(self, branch: _Branch, parent: _Branch) -> None:
        """Attach a branch to a parent whose heap does not contain it yet."""
        branch.parent = parent
        parent.children[branch.hashes[parent.depth]] = branch
        branch.posted = None
        self._propagate(branch)


def _common_length(a: Sequence[BlockHash], b: Sequence[BlockHash], start: int, end: int) -> int:
    """Return the number of equal leading hashes, at least ``start``; each covers earlier ones."""
    return start + bisect_left(range(start, end), True, key=lambda index: a[index] != b[index])


@dataclass(slots=True)
class RequestQueues:
    """Waiting, running and swapped requests, each queue in order of ``Request.queue_key``. ::

        add ──► waiting ──── start ────► running ──► finish
                   ▲                     │  │  ▲
                   ├────── restart ──────┘  │  │ swap_in
                   │                preempt ▼  │
                   └────── restart ───────  swapped

    A running request holds blocks and rows of the encoder cache, a swapped one host pages, a
    waiting one nothing. A request that cannot continue rests outside its queue until it can: see
    ``rest`` and ``wake``. So the queues hold only requests that a step may have to check.

    Attributes:
        encoder_cache_manager: manager of rows of images and other items; None for a model without.
        waiting: requests to compute from the start, or from a cached prefix.
        swapped: requests that continue where they were once their pages are swapped in.
        holders: paused requests that hold blocks, in order; the last is preempted first.
        resting: waiting and swapped requests that have nothing to run, by id.
        swaps_out: true if preempted requests go to the swap space, if there is one.
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
        """Number of requests that hold blocks, including paused ones."""
        return len(self.running) + len(self.holders)

    def add(self, request: Request) -> None:
        """Queue a validated request."""
        if request.is_paused:
            self.resting[request.request_id] = request
            return
        self.waiting.add(request, self._queue_hashes(request))

    def _queue_hashes(self, request: Request) -> Sequence[BlockHash]:
        """Return the hashes that sort a request in the queue: the encoder's input, then blocks."""
        if not self.kv_cache_manager.enable_prefix_caching:
            return ()
        block_size = self.kv_cache_manager.block_size
        request.extend_hashes(block_size)
        usable = (request.num_tokens - 1) // block_size
        hashes = tuple(request.block_hashes[:usable])
        encoder = request.encoder_blocks
        return hashes if encoder is None else (*encoder.hashes[:1], *hashes)

    def clear(self) -> None:
        """Forget all requests and what they hold, even after an interrupted call."""
        self.waiting = WaitingQueue()
        for queue in (self.running, self.swapped, self.holders, self.resting):
            queue.clear()
        self.kv_cache_manager.clear()
        if self.swap_space is not None:
            self.swap_space.clear()
        if self.encoder_cache_manager is not None:
            self.encoder_cache_manager.clear()

    def rest(self, request: Request) -> None:
        """Take a request out of its queue, without releasing anything, until it is woken.

        A running request rests only if it is paused: one that lacks a row will soon continue.
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
        """Put a resting request back into its queue, unless it is paused."""
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
        """Move a waiting request with allocated blocks to the running queue."""
        self.waiting.remove(request)
        self._run(request)

    def swap_in(self, request: Request) -> tuple[PageCopy, ...] | None:
        """Move a swapped request to the running queue and return the copies to make.

        Returns None if its pages and one block per running request do not fit.
        """
        if self.swap_space is None:
            return None
        headroom = len(self.running)  # resting requests do not grow
        copies = self.swap_space.swap_in(
            request.request_id, request.block_hashes, headroom=headroom
        )
        if copies is not None:
            _remove(self.swapped, request)
            self._run(request)
        return copies

    def preempt(self, request: Request) -> tuple[PageCopy, ...]:
        """Free a running request's blocks; return the copies that save its pages, if swapped out.

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
        self.restart(request)
        return ()

    def restart(self, request: Request) -> None:
        """Queue a request for recomputation, from the start or from its own cached blocks."""
        self._dequeue(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        self.add(request)

    def finish(self, request: Request) -> None:
        """Remove a request permanently from any queue."""
        self._dequeue(request)
        request.status = RequestStatus.FINISHED

    def chunk(self, request: Request, budget: int) -> int:
        """Return how many of a running request's tokens to run; 0 while it is idle."""
        start = request.num_computed_tokens
        num_tokens = min(request.num_known_tokens - start, budget)
        if request.is_paused or num_tokens <= 0:
            return 0
        num_tokens = self.kv_cache_manager.clip_chunk(
            request.request_id, start, num_tokens, request.num_tokens
        )
        return request.clip_chunk(num_tokens)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Allocate blocks for a running request's next tokens; False if too few are free."""
        return self.kv_cache_manager.allocate_slots(
            request.request_id,
            request.num_computed_tokens + num_tokens,
            num_computed_tokens=request.num_computed_tokens,
            encoder=request.encoder_blocks,
        )

    def hold_items(
        self,
        request: Request,
        num_tokens: int,
        budget: EncodingBudget,
        prefix: CachedPrefix | None = None,
    ) -> ItemShare:
        """Clip a chunk to the items whose rows are available, and hold those items."""
        manager = self.encoder_cache_manager
        if manager is None or not request.multimodal_inputs or not num_tokens:
            return ItemShare(num_tokens, (), budget)
        return manager.take(request, num_tokens, budget, prefix)

    def largest_item(self, request: Request, num_computed_tokens: int) -> int:
        """Return the number of pages of the largest item that a request must still hold."""
        manager = self.encoder_cache_manager
        return 0 if manager is None else manager.largest_item(request, num_computed_tokens)

    def release_items(self, request: Request, *, passed_only: bool = False) -> None:
        """Release the items that a request holds, or only those that are fully computed."""
        if self.encoder_cache_manager is not None and request.multimodal_inputs:
            self.encoder_cache_manager.release(request, passed_only=passed_only)

    def _run(self, request: Request) -> None:
        _insert(self.running, request)
        request.status = RequestStatus.RUNNING

    def _dequeue(self, request: Request) -> None:
        """Remove a request from its queue, and release what it holds."""
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
    insort(queue, request, key=_BY_KEY)


def _remove(queue: list[Request], request: Request) -> bool:
    """Remove a request; return False if it is not in the queue."""
    index = bisect_left(queue, request.queue_key, key=_BY_KEY)
    while index < len(queue) and queue[index].queue_key == request.queue_key:
        if queue[index] is request:
            del queue[index]
            return True
        index += 1
    return False
