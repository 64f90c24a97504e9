"""Block pool: reference counts, lookup by content hash, and eviction order.

A block is in exactly one state::

    free ──allocate──► held ──release──► free      (without a hash: nothing worth keeping)
      ▲                 ▲ └────release──► cached   (with a hash)
      │                 └─────touch────────┘ │
      └──── allocate evicts the LRU one ─────┘

Two requests may compute the same content, each in a separate block. Lookup returns the newest,
because a block is recomputed only when something was missing from the older one. Older blocks
stay while requests hold them, and lookup returns them again after the newest is evicted::

    hash ──► newest (held or cached)       unheld content is kept once: when an older block is
      └────► older ones (all held)         released it becomes free, and the newest is renewed

Eviction order: cached content has one of three priorities, each in LRU order::

    low      inside a sequence: windows and states used only by a hit that ends exactly there
    high     usable by any request with the same prefix
    reused   the same, after a hit or a second computation

The priority with the most pages relative to its share of the arena is evicted first. Shares start
equal; when a request misses a block that was evicted within the last turnover of the pool, the
share of that block's priority grows. A long scan fills and empties ``high`` only, and hot content
stays in ``reused``.

Large pages of one memory are shared by the groups that have pages there. Their states::

    free ──split for a group──► held (a table holds a block of it)
      ▲                          │   ▲
      │ no block has content     │   │ a block is held again
      └────────────◄─────────────┴─► unheld (blocks with content, no table holds one)
      ▲                                │
      └───────── evicted whole ◄───────┘ for another group

A group can allocate its own *spare* blocks (free or cached, in held pages) one by one, and any free
or unheld page as a whole. So ``needs[g]`` blocks for every group g can be allocated exactly if ::

    sum over g of ceil(max(0, needs[g] - spare[g]) / blocks per page[g])  <=  free + unheld pages
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from prefix_cache.blocks.block import BlockHash, EvictionKey, KVCacheBlock, LargePage
from prefix_cache.specs.kv_cache_spec import KVCacheConfig

LOW_PRIORITY = 0
"""Content inside a sequence, used only by a hit that ends exactly there."""
HIGH_PRIORITY = 1
"""Content usable by any request with the same prefix."""
REUSED_PRIORITY = 2
"""Content of high priority that was used before."""
_NUM_PRIORITIES = 3

_PAGES_OF_REWARD = 4
_MIN_SHARE = 1e-3


class _Evictable(Protocol):
    key: EvictionKey


T = TypeVar("T", bound=_Evictable)


class EvictionQueue(Generic[T]):
    """Queue ordered by key. Within a priority, each appended key must be larger than the last.

    Every operation is O(1), including removal from the middle (by a prefix hit).

    Args:
        order: all priorities in eviction order; read at each call.
    """

    def __init__(self, order: Sequence[int] = tuple(range(_NUM_PRIORITIES))) -> None:
        self._order = order
        self._queues: tuple[OrderedDict[int, T], ...] = tuple(
            OrderedDict() for _ in range(_NUM_PRIORITIES)
        )

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __iter__(self) -> Iterator[T]:
        """Iterate in eviction order."""
        for priority in self._order:
            yield from self._queues[priority].values()

    def __contains__(self, member: T) -> bool:
        return id(member) in self._queues[member.key[0]]

    @property
    def first(self) -> T | None:
        """Next member to evict, or None."""
        for priority in self._order:
            if queue := self._queues[priority]:
                return next(iter(queue.values()))
        return None

    def count(self, priority: int) -> int:
        """Return the number of members of a priority."""
        return len(self._queues[priority])

    def append(self, member: T) -> None:
        """Append a member to the end of its priority."""
        self._queues[member.key[0]][id(member)] = member

    def remove(self, member: T) -> None:
        """Remove a member from any position. Raises ``KeyError`` if it is not in the queue."""
        del self._queues[member.key[0]][id(member)]


@dataclass(slots=True)
class GroupPages:
    """Pages and blocks of one group in an arena.

    Attributes:
        blocks_per_page: blocks per large page.
        generations: ``(num_blocks,)`` int64 on the CPU: how often each block was allocated.
        null_block: block 0, which pads block tables and belongs to no request.
        cached: blocks with content that no table holds.
        num_spare: free and cached blocks in held pages.
    """

    group_id: int
    blocks_per_page: int
    generations: Tensor
    null_block: KVCacheBlock
    cached: EvictionQueue[KVCacheBlock]
    held_with_free: dict[int, LargePage] = field(default_factory=dict)
    unheld_with_free: dict[int, LargePage] = field(default_factory=dict)
    num_spare: int = 0
    num_held: int = 0

    def pages_needed(self, num_blocks: int) -> int:
        """Return how many large pages an allocation of ``num_blocks`` blocks consumes."""
        return max(0, -(-(num_blocks - self.num_spare) // self.blocks_per_page))


class PageArena:
    """Allocator of blocks: evicts content, and frees large pages that become entirely free.

    It has no hash table, but reports which blocks lose their content.

    Args:
        num_pages: number of large pages, including the null page.
        blocks_per_page: blocks per large page for each group in this arena.

    Attributes:
        free_pages: large pages of no group; the last is next, so that untouched memory stays so.
        unheld: large pages with content of which no table holds a block.
        shares: per priority, the share of the arena beyond which its content is evicted first.

    Attributes are read-only; only the methods change them.

    Raises:
        ValueError: if there is no page besides the null page.
    """

    def __init__(self, num_pages: int, blocks_per_page: Mapping[int, int]) -> None:
        if num_pages < 2:
            raise ValueError(
                f"num_blocks must be at least 2 (block 0 is the null block), got {num_pages}"
            )
        self.pages = [LargePage(page_id) for page_id in range(num_pages)]
        self.free_pages = self.pages[:0:-1]
        self.shares = [1 / _NUM_PRIORITIES] * _NUM_PRIORITIES
        self._order = list(range(_NUM_PRIORITIES))
        self.unheld: EvictionQueue[LargePage] = EvictionQueue(self._order)
        self.groups = {
            group_id: GroupPages(
                group_id,
                ratio,
                torch.zeros(num_pages * ratio, dtype=torch.int64),
                KVCacheBlock(0, group_id, None),
                EvictionQueue(self._order),
            )
            for group_id, ratio in blocks_per_page.items()
        }
        # Numpy views of the same memory, because element access is an order of magnitude cheaper.
        self._generations = {g: pages.generations.numpy() for g, pages in self.groups.items()}
        self._time = 0

    @property
    def num_available(self) -> int:
        """Number of large pages that any group could allocate now."""
        return len(self.free_pages) + len(self.unheld)

    def can_allocate(self, needs: Mapping[int, int], num_reserved: int = 0) -> bool:
        """Return True if ``needs`` blocks per group fit and leave ``num_reserved`` pages."""
        pages = sum(self.groups[g].pages_needed(count) for g, count in needs.items())
        return pages + num_reserved <= self.num_available

    def pages_for(self, counts: Mapping[int, int]) -> int:
        """Return the maximum number of large pages that ``counts`` blocks per group occupy.

        If a page holds several blocks, a group may occupy one page more than its blocks fill.
        """
        num_pages = 0
        for group_id, group in self.groups.items():
            count = counts.get(group_id, 0)
            num_pages += -(-count // group.blocks_per_page)
            num_pages += count > 0 and group.blocks_per_page > 1
        return num_pages

    def take(
        self, group_id: int, near: LargePage | None, may_take_page: bool
    ) -> tuple[KVCacheBlock, list[KVCacheBlock]]:
        """Allocate one block for a group, at the lowest cost.

        Free blocks are used before cached ones, and those near the request's last block before
        others. Content is evicted by :data:`EvictionKey` over all groups: the group's own oldest
        block, or the least recently held page of any group.

        Args:
            near: the large page of the request's last block.
            may_take_page: if true, a large page may be consumed; else ``num_spare`` must be > 0.

        Returns:
            The block, held once, and the blocks whose content was evicted for it.
        """
        group = self.groups[group_id]
        page = self._page_with_free(group, near, may_take_page)
        evicted: list[KVCacheBlock] = []
        if page is None and may_take_page and self.free_pages:
            page = self._split(self.free_pages.pop(), group)
        if page is None:
            # The priority with the most pages relative to its share comes first.
            self._order.sort(key=lambda each: (-self.unheld.count(each) / self.shares[each], each))
            of_group = (b for b in group.cached if may_take_page or _page_of(b).num_held)
            block = next(of_group, None)
            oldest_page = self.unheld.first if may_take_page else None
            if block is None or (oldest_page and self._rank(oldest_page) < self._rank(block)):
                if oldest_page is None:
                    raise RuntimeError(f"group {group_id} has no block to give: check first")
                evicted = list(oldest_page.cached)
                self._evict_page(oldest_page)
                page = self._split(self.free_pages.pop(), group)
            else:
                evicted = [block]
        if page is not None:
            block = page.free[-1]
        if block is None:
            raise RuntimeError(f"group {group_id} has no block to give: check first")
        self.hold(block)
        block.is_reused = False
        block.generation += 1
        self._generations[group_id][block.block_id] = block.generation
        return block, evicted

    def take_free_pages(self, group_id: int, count: int) -> list[KVCacheBlock]:
        """Call :meth:`take` ``count`` times in bulk, for free pages of one block each."""
        group, generations = self.groups[group_id], self._generations[group_id]
        blocks: list[KVCacheBlock] = []
        if not count:
            return blocks
        for page in self.free_pages[: -count - 1 : -1]:
            block_id = page.page_id
            generation = int(generations[block_id]) + 1
            generations[block_id] = generation
            block = KVCacheBlock(block_id, group_id, page, 1, None, generation)
            page.group_id, page.blocks, page.num_held = group_id, [block], 1
            blocks.append(block)
        del self.free_pages[-count:]
        group.num_held += count
        return blocks

    def hold(self, block: KVCacheBlock) -> None:
        """Set the reference count of an unheld block to 1."""
        page, group = _page_of(block), self.groups[block.group_id]
        group.num_held += 1
        if page.num_held:
            group.num_spare -= 1
        else:
            group.num_spare += group.blocks_per_page - 1
            if len(page.free) < group.blocks_per_page:
                self.unheld.remove(page)
            if group.unheld_with_free.pop(page.page_id, None):
                group.held_with_free[page.page_id] = page
        page.num_held += 1
        block.ref_cnt = 1
        if block.block_hash is not None:
            group.cached.remove(block)
        elif page.free and page.free[-1] is block:
            page.free.pop()
            if not page.free:
                group.held_with_free.pop(page.page_id, None)

    def release(self, block: KVCacheBlock, priority: int) -> None:
        """Release a block that is held once; with a hash it stays cached until evicted."""
        page, group = block.large_page, self.groups[block.group_id]
        if page is None:
            raise ValueError(f"the null block of group {block.group_id} is never held")
        self._time = time = self._time + 1
        block.ref_cnt = 0
        block.key = (priority, time)
        group.num_held -= 1
        page.num_held -= 1
        if block.block_hash is None:
            page.free.append(block)
        else:
            group.cached.append(block)
            if group.blocks_per_page == 1:
                page.key = block.key
                self.unheld.append(page)
                return
        if page.num_held:
            group.num_spare += 1
            if page.free:
                group.held_with_free[page.page_id] = page
            return
        group.num_spare -= group.blocks_per_page - 1
        group.held_with_free.pop(page.page_id, None)
        if len(page.free) == group.blocks_per_page:
            self._clear(page, group)
            return
        # The time at which the page is queued, not that of its content: the queue is in time order.
        page.key = (max([block.key[0] for block in page.cached]), self._time)
        self.unheld.append(page)
        if page.free:
            group.unheld_with_free[page.page_id] = page

    def requeue(self, block: KVCacheBlock, priority: int) -> None:
        """Move a cached block to the end of a priority."""
        page, group = _page_of(block), self.groups[block.group_id]
        is_renewed = block.key[0] == priority
        self._time += 1
        group.cached.remove(block)
        block.key = (priority, self._time)
        group.cached.append(block)
        if page.num_held == 0:
            self._update_priority(page, renew=is_renewed)

    def drop_content(self, block: KVCacheBlock) -> None:
        """Free a cached block that lost its hash, and its page if nothing else is in it."""
        page, group = _page_of(block), self.groups[block.group_id]
        group.cached.remove(block)
        page.free.append(block)
        if page.num_held:
            group.held_with_free[page.page_id] = page
        elif len(page.free) == group.blocks_per_page:
            self.unheld.remove(page)
            self._clear(page, group)
        else:
            group.unheld_with_free[page.page_id] = page
            self._update_priority(page)

    def reward(self, priority: int, weight: float) -> None:
        """Increase the share of a priority whose content was evicted too early."""
        self.shares[priority] += _PAGES_OF_REWARD * weight / len(self.pages)
        total = sum(self.shares)
        self.shares = [max(share / total, _MIN_SHARE) for share in self.shares]

    def _rank(self, member: _Evictable) -> EvictionKey:
        priority, time = member.key
        return self._order.index(priority), time

    def _update_priority(self, page: LargePage, *, renew: bool = False) -> None:
        """Give an unheld page the highest priority of its content; if equal, keep its position."""
        priority = max(block.key[0] for block in page.cached)
        if renew or priority != page.key[0]:
            self.unheld.remove(page)
            self._time += 1
            page.key = (priority, self._time)
            self.unheld.append(page)

    def _page_with_free(
        self, group: GroupPages, near: LargePage | None, may_take_page: bool
    ) -> LargePage | None:
        if near is not None and near.free and (near.num_held or may_take_page):
            return near
        if group.held_with_free:
            return next(reversed(group.held_with_free.values()))
        if may_take_page and group.unheld_with_free:
            return next(reversed(group.unheld_with_free.values()))
        return None

    def _split(self, page: LargePage, group: GroupPages) -> LargePage:
        """Divide a free page into blocks of a group; the first is allocated next."""
        ratio, generations = group.blocks_per_page, self._generations[group.group_id]
        first = page.page_id * ratio
        page.group_id = group.group_id
        page.blocks = [
            KVCacheBlock(block_id, group.group_id, page, 0, None, int(generations[block_id]))
            for block_id in range(first, first + ratio)
        ]
        page.free = page.blocks[::-1]
        if ratio > 1:
            group.unheld_with_free[page.page_id] = page
        return page

    def _evict_page(self, page: LargePage) -> None:
        """Evict an unheld page's content and free the page."""
        group = self.groups[page.blocks[0].group_id]
        for block in page.cached:
            group.cached.remove(block)
        self.unheld.remove(page)
        self._clear(page, group)

    def _clear(self, page: LargePage, group: GroupPages) -> None:
        group.unheld_with_free.pop(page.page_id, None)
        page.group_id = None
        page.blocks = []
        page.free = []
        self.free_pages.append(page)


def _page_of(block: KVCacheBlock) -> LargePage:
    if block.large_page is None:
        raise ValueError(f"the null block of group {block.group_id} is never held nor given")
    return block.large_page


_MAX_EVICTED = 2**16
"""Number of evicted blocks to remember, which covers about a million tokens."""


class BlockPool:
    """All blocks of one engine.

    Block 0 of every group is its null block, which pads block tables and is never allocated.

    Args:
        arenas: owners of the pages; every group belongs to one of them.

    Attributes:
        hash_tables: per group, a map from hash to the newest block of that content.
        older: (group id, hash) to held blocks of that content, the newest last; never empty.
        evictions: per group, number of cached blocks evicted for a new one.

    Attributes are read-only; only the methods change them.
    """

    def __init__(self, arenas: Sequence[PageArena]) -> None:
        self.arenas = tuple(arenas)
        self.older: dict[tuple[int, BlockHash], list[KVCacheBlock]] = {}
        # The priority of each evicted block, and the number of evictions at that time.
        self._evicted: OrderedDict[tuple[int, BlockHash], tuple[int, int]] = OrderedDict()
        self._arena_of = {g: arena for arena in self.arenas for g in arena.groups}
        self.evictions = dict.fromkeys(self._arena_of, 0)
        self.hash_tables: dict[int, dict[BlockHash, KVCacheBlock]] = {g: {} for g in self._arena_of}

    @classmethod
    def uniform(cls, num_blocks: int) -> BlockPool:
        """Create a pool of one group, number 0.

        Args:
            num_blocks: number of blocks, including the null block.

        Raises:
            ValueError: if there is no block besides the null block.
        """
        return cls([PageArena(num_blocks, {0: 1})])

    @classmethod
    def for_config(cls, config: KVCacheConfig) -> BlockPool:
        """Create a pool with one arena for all device groups and one for each host group."""
        groups = range(len(config.groups))
        on_device = {
            g: config.pages_per_large_page(g) for g in groups if config.groups[g].on_device
        }
        if config.item_page_bytes:
            encoder = config.item_group_id
            on_device[encoder] = config.pages_per_large_page(encoder)
        on_host = [g for g in groups if not config.groups[g].on_device]
        return cls(
            [
                PageArena(config.num_large_pages, on_device),
                *(PageArena(config.num_host_blocks, {g: 1}) for g in on_host),
            ]
        )

    @property
    def num_evictions(self) -> int:
        """Number of cached blocks of all groups evicted for a new one."""
        return sum(self.evictions.values())

    def null_block(self, group_id: int) -> KVCacheBlock:
        """Return block 0 of a group."""
        return self._arena_of[group_id].groups[group_id].null_block

    def generations(self, group_id: int) -> Tensor:
        """Return how often each block of a group was allocated: ``(num_blocks,)`` int64, CPU."""
        return self._arena_of[group_id].groups[group_id].generations

    def num_free(self, group_id: int = 0) -> int:
        """Return how many blocks the group could allocate now if no other group did."""
        arena = self._arena_of[group_id]
        group = arena.groups[group_id]
        return group.num_spare + arena.num_available * group.blocks_per_page

    def num_held(self, group_id: int) -> int:
        """Return the number of held blocks of the group."""
        return self._arena_of[group_id].groups[group_id].num_held

    def num_cached(self, group_id: int) -> int:
        """Return the number of unheld blocks of the group that have content."""
        return len(self._arena_of[group_id].groups[group_id].cached)

    def fits(self, counts: Mapping[int, int]) -> bool:
        """Return True if an empty pool could hold ``counts`` blocks per group."""
        return all(arena.pages_for(counts) < len(arena.pages) for arena in self.arenas)

    def lookup(self, group_id: int, block_hash: BlockHash) -> KVCacheBlock | None:
        """Find a block by content. Adds no reference: valid until the next allocation."""
        return self.hash_tables[group_id].get(block_hash)

    def lookup_all(
        self, group_id: int, block_hashes: Iterable[BlockHash]
    ) -> list[KVCacheBlock] | None:
        """Find all blocks by content, or return None at the first that is missing."""
        blocks: list[KVCacheBlock] = []
        for block_hash in block_hashes:
            block = self.lookup(group_id, block_hash)
            if block is None:
                return None
            blocks.append(block)
        return blocks

    def was_evicted(self, group_id: int, block_hash: BlockHash) -> bool:
        """Return True if this content is known to have been evicted; it may be cached again."""
        return (group_id, block_hash) in self._evicted

    def miss(self, group_id: int, block_hash: BlockHash, weight: float) -> None:
        """Record that a block, possibly an evicted one, would have made a hit longer."""
        evicted = self._evicted.get((group_id, block_hash))
        if evicted is not None:
            arena = self._arena_of[group_id]
            if self.num_evictions - evicted[1] < len(arena.pages):
                arena.reward(evicted[0], weight)

    def can_allocate(
        self, needs: Mapping[int, int], prefix: Sequence[Sequence[KVCacheBlock]] = ()
    ) -> bool:
        """Return True if :meth:`allocate` would succeed. Changes nothing.

        Args:
            prefix: per group, blocks of a hit that would be touched first. Unheld ones count as
                free until then, but touching consumes them.
        """
        unheld = [block for blocks in prefix for block in blocks if block.ref_cnt == 0]
        num_wanted = sum(needs.values()) + len(unheld)
        for arena in self.arenas:
            # Fast path: no block consumes more than one page.
            if num_wanted <= len(arena.free_pages):
                continue
            demand = {g: needs.get(g, 0) for g in arena.groups}
            pages: set[int] = set()
            for block in unheld:
                if block.group_id not in demand or block.large_page is None:
                    continue
                page = block.large_page
                demand[block.group_id] += 1
                if not page.num_held and page.page_id not in pages:
                    # The group may then use the other blocks of the page too.
                    pages.add(page.page_id)
                    demand[block.group_id] -= arena.groups[block.group_id].blocks_per_page
            if not arena.can_allocate(demand, len(pages)):
                return False
        return True

    def allocate(
        self,
        needs: Mapping[int, int],
        near: Mapping[int, LargePage | None] | None = None,
        keep: Mapping[int, int] | None = None,
    ) -> dict[int, list[KVCacheBlock]]:
        """Allocate blocks with one reference each, evicting content in eviction order.

        Args:
            needs: new blocks per group.
            near: per group, the preferred large page of new blocks.
            keep: blocks of other groups that must remain allocatable afterwards.

        Raises:
            ValueError: if there are too few blocks; nothing has changed then.
        """
        rest = {**needs, **(keep or {})}
        if not self.can_allocate(rest):
            wanted = {g: count for g, count in needs.items() if count}
            free = {g: self.num_free(g) for g in wanted}
            raise ValueError(f"blocks wanted per group {wanted}, free are at most {free}")
        blocks: dict[int, list[KVCacheBlock]] = {group_id: [] for group_id in needs}
        for group_id, count in needs.items():
            page, arena = near.get(group_id) if near else None, self._arena_of[group_id]
            has_plenty = sum(rest.values()) < arena.num_available  # at most one page per block
            if has_plenty and arena.groups[group_id].blocks_per_page == 1:
                num_free = min(count, len(arena.free_pages))
                blocks[group_id] += arena.take_free_pages(group_id, num_free)
                rest[group_id] -= num_free
            taken = blocks[group_id]
            for _ in range(rest[group_id]):
                may_take_page = has_plenty or self._may_take_page(arena, group_id, rest)
                block, evicted = arena.take(group_id, page, may_take_page)
                if evicted:
                    self._forget_evicted(evicted)
                rest[group_id] -= 1
                page = block.large_page
                taken.append(block)
        return blocks

    def touch(self, block: KVCacheBlock) -> None:
        """Add a reference to a block that was found by its content.

        Raises:
            ValueError: for the null block, and for a block without content.
        """
        if block.large_page is None:
            raise ValueError("the null block cannot be held")
        block.is_reused = True
        if block.ref_cnt:
            block.ref_cnt += 1
            return
        if block.block_hash is None:
            raise ValueError(f"block {block.block_id} is free and holds no content to share")
        self._arena_of[block.group_id].hold(block)

    def release(self, blocks: Iterable[KVCacheBlock], priority: int = HIGH_PRIORITY) -> None:
        """Drop one reference per block; null blocks are skipped.

        Args:
            blocks: blocks in eviction order: pass a table in reverse, so that the tail is evicted
                before the prefix, which others may still share.
            priority: priority of their content, if they have any and no other table holds them.

        Raises:
            ValueError: for a block that no table holds.
        """
        for block in blocks:
            if block.large_page is None:
                continue
            if block.ref_cnt == 0:
                raise ValueError(f"block {block.block_id} is released, but not held")
            if block.ref_cnt > 1:
                block.ref_cnt -= 1
                continue
            is_reused = priority == HIGH_PRIORITY and block.is_reused
            own_priority = REUSED_PRIORITY if is_reused else priority
            if self.older and block.block_hash is not None:
                self._release_duplicate(block, block.block_hash, own_priority)
            else:
                self._arena_of[block.group_id].release(block, own_priority)

    def demote(self, block: KVCacheBlock) -> None:
        """Lower a cached block to low priority; held and free blocks are left unchanged."""
        cached = block.ref_cnt == 0 and block.block_hash is not None
        if cached and block.key[0] != LOW_PRIORITY:
            self._arena_of[block.group_id].requeue(block, LOW_PRIORITY)

    def evict(self, group_id: int) -> None:
        """Evict the content of a group's next cached block in eviction order."""
        arena = self._arena_of[group_id]
        block = arena.groups[group_id].cached.first
        if block is None:
            raise ValueError(f"group {group_id} has no cached block to evict")
        self._forget_evicted([block])
        arena.drop_content(block)

    def renew(self, block: KVCacheBlock, block_hash: BlockHash) -> None:
        """Mark a block as just released, if it is still cached with this content."""
        if block.ref_cnt == 0 and block.block_hash == block_hash:
            self._arena_of[block.group_id].requeue(block, block.key[0])

    def forget(self, block: KVCacheBlock, block_hash: BlockHash) -> None:
        """Free a block, if it is still cached with this content."""
        if block.ref_cnt == 0 and block.block_hash == block_hash:
            self._forget_newest(block.group_id, block_hash)
            block.block_hash = None
            self._arena_of[block.group_id].drop_content(block)

    def publish(self, block: KVCacheBlock, block_hash: BlockHash) -> None:
        """Make a held block findable by its content. Call it after its rows are written.

        The newest block wins, because a block is recomputed only when something was missing from
        the older one. The older one becomes free if no table holds it; otherwise lookup returns
        it again after the newest is evicted.

        Raises:
            ValueError: for a block that no table holds, or that already has another hash.
        """
        if block.ref_cnt == 0:
            raise ValueError(f"block {block.block_id} is published, but not held")
        if block.block_hash is not None:
            if block.block_hash != block_hash:
                raise ValueError(f"block {block.block_id} is full and published under another hash")
            return
        found = self.hash_tables[block.group_id]
        older = found.get(block_hash)
        block.is_reused = older is not None or self.was_evicted(block.group_id, block_hash)
        if older is not None:
            if older.ref_cnt:
                self.older.setdefault((block.group_id, block_hash), []).append(older)
            else:
                older.block_hash = None
                self._arena_of[older.group_id].drop_content(older)
        block.block_hash = block_hash
        found[block_hash] = block

    def reset(self) -> None:
        """Forget all content, so that no block can be found. References are unchanged."""
        for found in self.hash_tables.values():
            for block in found.values():
                block.block_hash = None
                if block.ref_cnt == 0:
                    self._arena_of[block.group_id].drop_content(block)
            found.clear()
        for blocks in self.older.values():
            for block in blocks:
                block.block_hash = None
        self.older.clear()
        self._evicted.clear()

    def _release_duplicate(self, block: KVCacheBlock, block_hash: BlockHash, priority: int) -> None:
        """Release a block that may have duplicates with equal content; only the newest is kept."""
        key = (block.group_id, block_hash)
        arena = self._arena_of[block.group_id]
        newest = self.hash_tables[block.group_id][block_hash]
        if block is newest:
            arena.release(block, priority)
            return
        self.older[key].remove(block)
        if not self.older[key]:
            del self.older[key]
        block.block_hash = None
        arena.release(block, priority)
        if newest.ref_cnt == 0:
            # The content was in use until now, so it is queued as just released.
            priority = max(priority, newest.key[0])
            arena.hold(newest)
            arena.release(newest, priority)

    def _may_take_page(self, arena: PageArena, group_id: int, rest: Mapping[int, int]) -> bool:
        """Return True if a block may consume a page and the rest of the allocation still fits."""
        return (
            sum(rest.values()) < arena.num_available
            or arena.groups[group_id].pages_needed(rest[group_id]) > 0
            or sum(pages.pages_needed(rest.get(g, 0)) for g, pages in arena.groups.items())
            < arena.num_available
        )

    def _forget_evicted(self, evicted: Sequence[KVCacheBlock]) -> None:
        """Remove evicted blocks from the hash tables and remember their hashes."""
        for old in evicted:
            if old.block_hash is not None:
                self._forget_newest(old.group_id, old.block_hash)
                self._evicted[old.group_id, old.block_hash] = (old.key[0], self.num_evictions)
                if len(self._evicted) > _MAX_EVICTED:
                    self._evicted.popitem(last=False)
                old.block_hash = None
                self.evictions[old.group_id] += 1

    def _forget_newest(self, group_id: int, block_hash: BlockHash) -> None:
        """Remove the evicted newest block of a content; lookup then returns a held older one.

        Evicted blocks are unheld, and among unheld blocks only the newest has a hash.
        """
        others = self.older.get((group_id, block_hash))
        if others is None:
            del self.hash_tables[group_id][block_hash]
            return
        self.hash_tables[group_id][block_hash] = others.pop()
        if not others:
            del self.older[group_id, block_hash]
