"""Where live requests stand, and what they hold there.

Waiting requests in the order of their turn, of which many can be left out at once.

Requests that wait for the same block need not be looked at one by one. The queue is a tree of their
block hashes, in which those that begin alike lie under one branch, and every branch knows which of
its requests comes first::

    hashes                              tree                    first of the branch
    r1   a b c d                        a b ── c d ── e   r4    r1
    r2   a b x                           │      └── (r1)        r1
    r3   k                               └──── x  (r2)          r2
    r4   a b c d e                      k  (r3)                 r3

Leaving out all that begin with ``a b c`` is to close one branch. Whatever is added, taken out or
left out changes the firsts on the way up from there only, so no step costs more for a longer queue.
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
    """Rows that towers or an encoder-decoder's encoder may still give in a step; None: no limit."""

    num_tokens: int | None
    is_untouched: bool = True

    def allows(self, num_tokens: int) -> bool:
        """Whether an input of so many rows may run; one that is too long may if it runs alone."""
        return self.num_tokens is None or num_tokens <= self.num_tokens or self.is_untouched

    def less(self, num_tokens: int) -> EncodingBudget:
        """What is left after an input of so many rows."""
        left = None if self.num_tokens is None else self.num_tokens - num_tokens
        return EncodingBudget(left, is_untouched=False)


@dataclass(frozen=True, slots=True)
class ItemShare:
    """A chunk, cut to the items whose rows it can have.

    Attributes:
        to_encode: items that towers have to encode for them.
        lacks_room: whether nothing is left of it for want of room for an item.
    """

    num_tokens: int
    to_encode: tuple[MultiModalInput, ...]
    budget: EncodingBudget
    lacks_room: bool = False


class EncoderCacheManager:
    """Holds rows that towers made, in pages of the pool, for requests that are in their middle.

    An item is held from the step that computes its first placeholder which the prefix cache does
    not have, to the step that computes its last one; so an item that a prefix hit covers is never
    held nor encoded. A request that stands before an item for which there is no room holds no
    item. Given back, an item's pages wait to be evicted like any others, and are found again by
    its content::

        item      |<----- 6 rows ----->|
        step 1    |#########|               held: by every request that has begun and not ended it
        step 2              |##########|    given back: cached, until others need its pages

    Pieces of an item are held one by one, each as the whole: were it held from the first to the
    last, a video could wait for room for its sound, and hold it. What others push out between two
    pieces is encoded again.

    Args:
        kv_cache_manager: of a config with pages for rows of items.
        memory: where the pages are.
        row: ``(hidden_size,)``, of the type of the rows; a tensor on ``meta`` will do.

    Attributes:
        num_hits: how often an item was held that was there, or about to be.
        num_encoded: items that were run through a tower.
    """

    def __init__(self, kv_cache_manager: KVCacheManager, memory: PagedMemory, row: Tensor) -> None:
        self._kv, self._memory, self._row = kv_cache_manager, memory, row
        self.num_hits = 0
        self.num_encoded = 0
        self.clear()

    def clear(self) -> None:
        """Forget all rows and who holds them; the pool forgets them as well, or has already."""
        self._held: dict[str, dict[MultiModalInput, list[KVCacheBlock]]] = {}
        # Held pages that cannot be found in the pool: to be encoded in this step, or not published.
        self._unpublished: dict[bytes, list[KVCacheBlock]] = {}

    def forget(self) -> None:
        """Let nothing that was encoded so far be found; who holds it keeps it."""
        self._unpublished.clear()

    def take(
        self,
        request: Request,
        num_tokens: int,
        budget: EncodingBudget,
        prefix: CachedPrefix | None = None,
    ) -> ItemShare:
        """Hold the items that lie in a request's next ``num_tokens`` tokens, as far as they fit.

        The chunk ends before the first item that neither is there nor can be encoded. There is room
        for the pages of new items together with the blocks of its tokens.

        Args:
            prefix: of a waiting request, what it would begin with.
        """
        start = request.num_computed_tokens
        stop = start + num_tokens
        to_encode: list[MultiModalInput] = []
        lacks_room = False
        # What a request would begin with must not make room for what it is shown.
        tables = (*prefix.blocks, tuple(prefix.sources.values())) if prefix is not None else ()
        adopted = [b for table in tables for b in reversed(table) if b.large_page is not None]
        self._rows.hold(adopted)
        for item in request.multimodal_inputs:
            held = self._held.get(request.request_id, {})
            if not item.overlaps(start, stop) or item in held:
                continue
            same = (x for other, x in held.items() if other.content_hash == item.content_hash)
            if (blocks := next(same, None)) is not None:  # another piece, or shown twice
                held[item] = blocks
                continue
            blocks = self._find(item)
            num_pages = self._num_pages(item) if blocks is None else 0
            needs = self._needs(request, stop, prefix)
            lacks_room = not self._rows.has_room(num_pages, beside=needs)
            if lacks_room or (blocks is None and not budget.allows(item.num_rows)):
                if blocks is not None:
                    self._give_back(item, blocks)
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
        """Pages of the largest item that a request has still to hold."""
        items = (x for x in request.multimodal_inputs if x.end > num_computed_tokens)
        return max(map(self._num_pages, items), default=0)

    def fill(self, item: MultiModalInput, rows: Tensor) -> None:
        """Keep what a tower made of an item that is held; from now on others may find it.

        Raises:
            ValueError: there is no page for it, or the rows are not of the form that was expected.
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
        """Some rows of an item that a request holds, in memory of their own."""
        block_ids = [block.block_id for block in self._held[request_id][item]]
        width = item.row_parts * len(self._row)
        return self._memory.read_rows(block_ids, wanted, width, self._row.dtype)

    def release(self, request: Request, *, passed_only: bool = False) -> None:
        """Give back what a request holds, or what of it is computed to its end."""
        held = self._held.get(request.request_id, {})
        for item in list(held):
            if not passed_only or item.end <= request.num_computed_tokens:
                blocks = held.pop(item)
                if not any(other is blocks for other in held.values()):
                    self._give_back(item, blocks)
        if not held:
            self._held.pop(request.request_id, None)

    def tables(self) -> list[list[KVCacheBlock]]:
        """The pages of each item that a request holds, for integrity checks."""
        return [
            blocks
            for held in self._held.values()
            for blocks in {id(blocks): blocks for blocks in held.values()}.values()
        ]

    @property
    def _rows(self) -> WholeInputCache:
        if self._kv.item_rows is None:
            raise ValueError("the KV cache has no pages for rows of items")
        return self._kv.item_rows

    def _nbytes(self, item: MultiModalInput) -> int:
        return item.num_rows * item.row_parts * self._row.nbytes

    def _num_pages(self, item: MultiModalInput) -> int:
        return self._rows.num_blocks_for(self._nbytes(item))

    def _find(self, item: MultiModalInput) -> list[KVCacheBlock] | None:
        """Hold an item that is there, or about to be."""
        blocks = self._unpublished.get(item.content_hash)
        if blocks is None:
            return self._rows.find(BlockHash(item.content_hash), self._nbytes(item))
        self._rows.hold(blocks)
        return blocks

    def _needs(self, request: Request, stop: int, prefix: CachedPrefix | None) -> dict[int, int]:
        """Blocks of every group that a request's tokens before ``stop`` lack."""
        encoder = request.encoder_blocks
        return self._kv.coordinator.needs(
            request.request_id,
            stop,
            prefix.blocks if prefix is not None else (),
            sources=prefix.sources if prefix is not None else {},
            num_computed_tokens=request.num_computed_tokens,
            num_encoder_tokens=encoder.num_tokens if encoder is not None else 0,
        )

    def _give_back(self, item: MultiModalInput, blocks: Sequence[KVCacheBlock]) -> None:
        self._rows.release(blocks)
        if not blocks[0].ref_cnt and self._unpublished.get(item.content_hash) == blocks:
            del self._unpublished[item.content_hash]


Key: TypeAlias = tuple[int, int]
_Entry: TypeAlias = "tuple[Key, int, Request | _Branch]"

_Choice: TypeAlias = Callable[[Set[BlockHash]], Set[BlockHash]]

_FEW = 16
_BY_KEY = attrgetter("queue_key")


@dataclass(slots=True, eq=False)
class _Branch:
    """Requests whose hashes begin alike.

    Attributes:
        parent: the branch that it leaves; None for the root, and for one that is gone.
        hashes: of any of its requests; the first ``depth`` are those of all.
        children: what goes on from here, by the next hash.
        num_own: requests that have no hashes beyond ``depth``.
        heap: the own requests and the children, each with its key; stale entries are left until
            they come first, or are many.
        posted: key of the first request here, as the parent's heap has it; None: none is open.
        ticket: number of that entry; entries of other numbers are stale.
        but: None while it is open. Else all is left out but these children.
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
    but: tuple[_Branch, ...] | None = None


class WaitingQueue:
    """Requests by ``Request.queue_key``."""

    def __init__(self) -> None:
        self._root = _Branch(None, (), 0)
        self._places: dict[str, tuple[_Branch, int, Request]] = {}
        self._closed: list[_Branch] = []
        self._passed: list[Request] = []
        self._num_tickets = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Request]:
        """All requests, in no particular order."""
        return (request for _, _, request in self._places.values())

    def add(self, request: Request, hashes: Sequence[BlockHash]) -> None:
        """Put a request in.

        Args:
            hashes: of the blocks that it could find; each stands for those before it as well.
        """
        branch = self._root
        while branch.depth < len(hashes):
            child = branch.children.get(hashes[branch.depth])
            if child is None:
                child = _Branch(branch, hashes, len(hashes))
                branch.children[hashes[branch.depth]] = child
            else:
                end = min(child.depth, len(hashes))
                alike = _num_alike(child.hashes, hashes, branch.depth + 1, end)
                if alike < child.depth:
                    child = self._split(child, alike)
            branch = child
        branch.num_own += 1
        self._enter(branch, request)

    def remove(self, request: Request) -> None:
        """Take a request out. ``KeyError`` if it is not here."""
        branch, _, _ = self._places.pop(request.request_id)
        branch.num_own -= 1
        self._outdate(branch)
        self._tidy(branch)

    def first(self) -> Request | None:
        """The first request that is not left out."""
        branch = self._root
        while True:
            item = self._first_of(branch)
            if not isinstance(item, _Branch):
                return item
            branch = item

    def pass_over(self, request: Request) -> None:
        """Leave a request out until :meth:`reopen`."""
        branch, _, _ = self._places[request.request_id]
        self._places[request.request_id] = (branch, -1, request)
        self._outdate(branch)
        self._passed.append(request)
        self._post(branch)

    def pass_over_alike(
        self, request: Request, num_hashes: int, but: _Choice | None = None
    ) -> None:
        """Leave out, until :meth:`reopen`, all whose first hashes are those of a request.

        Args:
            request: it is left out in any case.
            num_hashes: how many hashes count, at least 1.
            but: of the hashes with which others go on, those of which none is to be left out.
        """
        branch, _, _ = self._places[request.request_id]
        if branch.depth < num_hashes:  # it has got more of them since it came
            self.pass_over(request)
            return
        own_child = branch
        while branch.parent is not None and branch.parent.depth >= num_hashes:
            own_child, branch = branch, branch.parent
        if branch.depth > num_hashes:
            own_child, branch = branch, self._split(branch, num_hashes)
        branch.but = ()
        if but is not None:
            kept = (branch.children[each] for each in but(branch.children.keys()))
            branch.but = tuple(child for child in kept if child is not own_child)
        self._closed.append(branch)
        self._post(branch)

    def reopen(self) -> None:
        """Let all requests be found again."""
        closed, self._closed = self._closed, []
        for branch in closed:
            branch.but = None
            if branch.parent is not None:
                self._post(branch)
                self._tidy(branch)
        passed, self._passed = self._passed, []
        for request in passed:
            if request.request_id in self._places:
                self._enter(self._places[request.request_id][0], request)

    def _enter(self, branch: _Branch, request: Request) -> None:
        self._num_tickets += 1
        self._places[request.request_id] = (branch, self._num_tickets, request)
        heappush(branch.heap, (request.queue_key, self._num_tickets, request))
        self._post(branch)

    def _post(self, branch: _Branch) -> None:
        """Tell the branches above which request is now the first here."""
        while branch.parent is not None:
            parent, key = branch.parent, self._first_key(branch)
            if key == branch.posted:
                return
            was_posted, branch.posted = branch.posted is not None, key
            self._num_tickets += 1
            branch.ticket = self._num_tickets
            if was_posted:
                self._outdate(parent)
            if key is not None:
                heappush(parent.heap, (key, branch.ticket, branch))
            branch = parent

    def _first_key(self, branch: _Branch) -> Key | None:
        item = self._first_of(branch)
        if item is None:
            return None
        return item.posted if isinstance(item, _Branch) else item.queue_key

    def _first_of(self, branch: _Branch) -> Request | _Branch | None:
        """What comes first among a branch's children and own requests, as far as they are open."""
        if branch.but is not None:
            opened = [(child.posted, child) for child in branch.but if child.posted is not None]
            return min(opened, key=lambda pair: pair[0])[1] if opened else None
        heap = branch.heap
        while heap and not self._is_current(heap[0]):
            heappop(heap)
            branch.num_stale -= 1
        return heap[0][2] if heap else None

    def _outdate(self, branch: _Branch) -> None:
        """One more entry of a branch's heap is stale; when most are, they are thrown away."""
        branch.num_stale += 1
        if branch.num_stale > _FEW + len(branch.heap) // 2:
            branch.heap = [entry for entry in branch.heap if self._is_current(entry)]
            heapify(branch.heap)
            branch.num_stale = 0

    def _is_current(self, entry: _Entry) -> bool:
        _, ticket, item = entry
        if isinstance(item, _Branch):
            return item.ticket == ticket and item.posted is not None
        place = self._places.get(item.request_id)
        return place is not None and place[1] == ticket

    def _split(self, branch: _Branch, depth: int) -> _Branch:
        """Put a new branch of this depth between a branch and its parent."""
        parent = branch.parent
        if parent is None:
            raise ValueError("the root has no parent")
        new = _Branch(parent, branch.hashes, depth)
        self._replace(parent, branch, new)
        self._hang(branch, new)
        return new

    def _tidy(self, branch: _Branch) -> None:
        """Take away branches that are empty, or do nothing but go on in one way."""
        while (
            branch.parent is not None
            and branch.but is None
            and not branch.num_own
            and len(branch.children) < 2
        ):
            parent, only = branch.parent, next(iter(branch.children.values()), None)
            self._replace(parent, branch, only)
            branch.parent = None
            if only is not None:
                self._hang(only, parent)
            branch = parent
        self._post(branch)

    def _replace(self, parent: _Branch, old: _Branch, new: _Branch | None) -> None:
        """Let a parent have another branch, or none, where it had an old one."""
        key = old.hashes[parent.depth]
        if new is None:
            del parent.children[key]
        else:
            parent.children[key] = new
        if parent.but is not None:
            kept = (new if child is old else child for child in parent.but)
            parent.but = tuple(child for child in kept if child is not None)
        if old.posted is not None:
            old.posted = None
            self._outdate(parent)

    def _hang(self, branch: _Branch, parent: _Branch) -> None:
        """Let a branch go on from another one, of whose heap it is not yet part."""
        branch.parent = parent
        parent.children[branch.hashes[parent.depth]] = branch
        branch.posted = None
        self._post(branch)


def _num_alike(a: Sequence[BlockHash], b: Sequence[BlockHash], start: int, end: int) -> int:
    """How many hashes are equal: ``start`` at least; each stands for those before it as well."""
    return start + bisect_left(range(start, end), True, key=lambda index: a[index] != b[index])


@dataclass(slots=True)
class RequestQueues:
    """The waiting, running and swapped requests, each queue in order of ``Request.queue_key``. ::

        add ──► waiting ──── start ────► running ──► finish
                   ▲                     │  │  ▲
                   ├────── restart ──────┘  │  │ swap_in
                   │                preempt ▼  │
                   └────── restart ───────  swapped

    A running request holds blocks and rows of the encoder cache, a swapped one pages of the host,
    a waiting one nothing. One that cannot go on rests where it is, beside its queue, until it can:
    ``rest`` and ``wake``. So the queues hold what a step may have to look at, and no more.

    Attributes:
        encoder_cache_manager: holds the rows of images and the like; None for a model that takes
            none.
        waiting: requests that have to be computed from the start, or from a cached prefix.
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
        self.waiting.add(request, self._hashes_to_find(request))

    def _hashes_to_find(self, request: Request) -> Sequence[BlockHash]:
        """What says which waiting requests begin alike: the encoder's input, then the blocks."""
        if not self.kv_cache_manager.enable_prefix_caching:
            return ()
        block_size = self.kv_cache_manager.block_size
        request.extend_hashes(block_size)
        usable = (request.num_tokens - 1) // block_size
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
        """Let a swapped request run by these copies; None without room for its pages.

        Room for a block of each running request is left.
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
        self.restart(request)
        return ()

    def restart(self, request: Request) -> None:
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
        start = request.num_computed_tokens
        num_tokens = min(request.num_known_tokens - start, budget)
        if request.is_paused or num_tokens <= 0:
            return 0
        num_tokens = self.kv_cache_manager.clip_chunk(
            request.request_id, start, num_tokens, request.num_tokens
        )
        return request.clip_chunk(num_tokens)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Get blocks for a running request's next tokens; False if too few are free."""
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
        """Cut a chunk to the images and the like whose rows it can have, and hold these."""
        manager = self.encoder_cache_manager
        if manager is None or not request.multimodal_inputs or not num_tokens:
            return ItemShare(num_tokens, (), budget)
        return manager.take(request, num_tokens, budget, prefix)

    def largest_item(self, request: Request, num_computed_tokens: int) -> int:
        """Pages of the largest item that a request has still to hold."""
        manager = self.encoder_cache_manager
        return 0 if manager is None else manager.largest_item(request, num_computed_tokens)

    def release_items(self, request: Request, *, passed_only: bool = False) -> None:
        """Give back the rows that a request holds, or those of items that it has computed."""
        if self.encoder_cache_manager is not None and request.multimodal_inputs:
            self.encoder_cache_manager.release(request, passed_only=passed_only)

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
    insort(queue, request, key=_BY_KEY)


def _remove(queue: list[Request], request: Request) -> bool:
    """Take a request out; False if it is not there."""
    index = bisect_left(queue, request.queue_key, key=_BY_KEY)
    while index < len(queue) and queue[index].queue_key == request.queue_key:
        if queue[index] is request:
            del queue[index]
            return True
        index += 1
    return False
