"""Large pages of one memory, shared by the groups that have pages there.

A large page goes through these states; blocks follow inside of it::

    free ──split for a group──► held (a table holds a block of it)
      ▲                          │   ▲
      │ no block has content     │   │ a block is held again
      └────────────◄─────────────┴─► unheld (blocks with content, no table holds one)
      ▲                                │
      └───────── evicted whole ◄───────┘ for another group

What can a group take? Its own *spare* blocks (free or cached, in held pages), one by one; and any
free or unheld page, whole. So ``needs[g]`` blocks for every group g can be had exactly if ::

    sum over g of ceil(max(0, needs[g] - spare[g]) / blocks per page[g])  <=  free + unheld pages"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from prefix_cache.blocks.block import EvictionKey, KVCacheBlock, LargePage

__all__ = ["EvictionQueue", "GroupPages", "PageArena"]

NUM_PRIORITIES = 2
"""Priority 0 is evicted before anything of priority 1, whatever their times."""


class _Evictable(Protocol):
    key: EvictionKey


T = TypeVar("T", bound=_Evictable)


class EvictionQueue(Generic[T]):
    """Members by their key. Keys must grow within a priority from one ``append`` to the next.

    Every operation is O(1), removal from the middle, as by a hit, included.
    """

    def __init__(self) -> None:
        self._queues: tuple[OrderedDict[int, T], ...] = tuple(
            OrderedDict() for _ in range(NUM_PRIORITIES)
        )

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __iter__(self) -> Iterator[T]:
        """From what is evicted first to what is evicted last."""
        for queue in self._queues:
            yield from queue.values()

    def __contains__(self, member: T) -> bool:
        return id(member) in self._queues[member.key[0]]

    @property
    def first(self) -> T | None:
        """What is evicted next, or None."""
        for queue in self._queues:
            if queue:
                return next(iter(queue.values()))
        return None

    def append(self, member: T) -> None:
        """Put a member last in its priority."""
        self._queues[member.key[0]][id(member)] = member

    def remove(self, member: T) -> None:
        """Take a member from wherever it is. ``KeyError`` when it is not here."""
        del self._queues[member.key[0]][id(member)]


@dataclass(slots=True)
class GroupPages:
    """What one group has in an arena.

    Attributes:
        group_id: the group.
        blocks_per_page: blocks that a large page is cut into.
        generations: ``(num_blocks,)`` int64 on the CPU: how often each block was handed out.
        null_block: block 0: it pads block tables and belongs to no request.
        cached: blocks with content that no table holds.
        held_with_free: held pages that have free blocks.
        unheld_with_free: unheld pages that have free blocks.
        num_spare: free and cached blocks in held pages.
        num_held: blocks that a table holds.
    """

    group_id: int
    blocks_per_page: int
    generations: Tensor
    null_block: KVCacheBlock
    cached: EvictionQueue[KVCacheBlock] = field(default_factory=EvictionQueue)
    held_with_free: dict[int, LargePage] = field(default_factory=dict)
    unheld_with_free: dict[int, LargePage] = field(default_factory=dict)
    num_spare: int = 0
    num_held: int = 0

    def pages_needed(self, num_blocks: int) -> int:
        """Large pages without which ``num_blocks`` cannot be had."""
        return max(0, -(-(num_blocks - self.num_spare) // self.blocks_per_page))


class PageArena:
    """Hands out blocks, evicts, and takes large pages back when they come free whole.

    It keeps no hash table: it says which blocks lose their content.

    Args:
        num_pages: large pages, the null page included.
        blocks_per_page: per group that lives here, blocks that a large page is cut into.

    Attributes:
        pages: every large page by its id.
        groups: what each group has here.
        free_pages: large pages of no group; the last is next, so that untouched memory stays so.
        unheld: large pages with content that no table holds a block of.

    Attributes are for reading; only the methods change them.

    Raises:
        ValueError: if there is no page beside the null page.
    """

    def __init__(self, num_pages: int, blocks_per_page: Mapping[int, int]) -> None:
        if num_pages < 2:
            raise ValueError(
                f"num_blocks must be at least 2 (block 0 is the null block), got {num_pages}"
            )
        self.pages = [LargePage(page_id) for page_id in range(num_pages)]
        self.free_pages = self.pages[:0:-1]
        self.unheld: EvictionQueue[LargePage] = EvictionQueue()
        self.groups = {
            group_id: GroupPages(
                group_id,
                ratio,
                torch.zeros(num_pages * ratio, dtype=torch.int64),
                KVCacheBlock(0, group_id, None),
            )
            for group_id, ratio in blocks_per_page.items()
        }
        # The same memory; element access through numpy is an order of magnitude cheaper.
        self._generations = {g: pages.generations.numpy() for g, pages in self.groups.items()}
        self._time = 0

    @property
    def num_available(self) -> int:
        """Large pages that any group could have now."""
        return len(self.free_pages) + len(self.unheld)

    def can_allocate(self, needs: Mapping[int, int], num_reserved: int = 0) -> bool:
        """Whether the groups could have ``needs`` blocks and leave ``num_reserved`` pages."""
        pages = sum(self.groups[g].pages_needed(count) for g, count in needs.items())
        return pages + num_reserved <= self.num_available

    def pages_for(self, counts: Mapping[int, int]) -> int:
        """Large pages that so many blocks of each group can lie in.

        Where pages are cut up, a group's blocks may lie across one page more than they fill.
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
        """One block for a group, the cheapest to give up first.

        Free blocks go before content, those near the request's last block before others, and
        content goes by :data:`EvictionKey` over all groups: the group's own oldest block, or the
        page of any group that was held least recently.

        Args:
            group_id: for whom.
            near: the large page of the request's last block.
            may_take_page: whether a large page may be used up; if not, ``num_spare`` must be > 0.

        Returns:
            The block, held once, and the blocks whose content was given up for it.
        """
        group = self.groups[group_id]
        page = self._page_with_free(group, near, may_take_page)
        evicted: list[KVCacheBlock] = []
        if page is None and may_take_page and self.free_pages:
            page = self._split(self.free_pages.pop(), group)
        if page is None:
            block = self._oldest_block(group, may_take_page)
            oldest_page = self.unheld.first if may_take_page else None
            if block is None or (oldest_page is not None and oldest_page.key < block.key):
                if oldest_page is None:
                    raise RuntimeError(f"group {group_id} has no block to give: check first")
                evicted = list(oldest_page.cached)
                self._take_back(oldest_page)
                page = self._split(self.free_pages.pop(), group)
            else:
                evicted = [block]
        if page is not None:
            block = page.free[-1]
        if block is None:
            raise RuntimeError(f"group {group_id} has no block to give: check first")
        self.hold(block)
        block.generation += 1
        self._generations[group_id][block.block_id] = block.generation
        return block, evicted

    def hold(self, block: KVCacheBlock) -> None:
        """A block that no table holds is held once."""
        page, group = _page_of(block), self.groups[block.group_id]
        group.num_held += 1
        if page.num_held:
            group.num_spare -= 1
        else:
            group.num_spare += group.blocks_per_page - 1
            if page in self.unheld:
                self.unheld.remove(page)
            if group.unheld_with_free.pop(page.page_id, None):
                group.held_with_free[page.page_id] = page
        page.num_held += 1
        block.ref_cnt = 1
        if block.block_hash is not None:
            group.cached.remove(block)
        if page.free and page.free[-1] is block:
            page.free.pop()
            if not page.free:
                group.held_with_free.pop(page.page_id, None)

    def release(self, block: KVCacheBlock, priority: int) -> None:
        """A block that is held once is held no more; with a hash it waits to be evicted."""
        page, group = _page_of(block), self.groups[block.group_id]
        self._time += 1
        block.ref_cnt = 0
        block.key = (priority, self._time)
        group.num_held -= 1
        page.num_held -= 1
        if block.block_hash is None:
            page.free.append(block)
        else:
            group.cached.append(block)
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
        # The time at which it came to wait, not that of its content: the queue goes by time.
        page.key = (max(block.key[0] for block in page.cached), self._time)
        self.unheld.append(page)
        if page.free:
            group.unheld_with_free[page.page_id] = page

    def demote(self, block: KVCacheBlock, priority: int) -> None:
        """A cached block waits with another priority, last in it; unless it does already."""
        if block.key[0] == priority:
            return
        page, group = _page_of(block), self.groups[block.group_id]
        self._time += 1
        group.cached.remove(block)
        block.key = (priority, self._time)
        group.cached.append(block)
        if page.num_held == 0:
            self._update_priority(page)

    def drop_content(self, block: KVCacheBlock) -> None:
        """A cached block lost its hash: it becomes free, and its page with it if that was all."""
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

    def _update_priority(self, page: LargePage) -> None:
        """An unheld page waits with the highest priority of its content; keep it if that stays."""
        priority = max(block.key[0] for block in page.cached)
        if priority != page.key[0]:
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

    def _oldest_block(self, group: GroupPages, may_take_page: bool) -> KVCacheBlock | None:
        if may_take_page:
            return group.cached.first
        return next((b for b in group.cached if _page_of(b).num_held), None)

    def _split(self, page: LargePage, group: GroupPages) -> LargePage:
        """Cut a free page into blocks of a group; the first is next."""
        ratio, generations = group.blocks_per_page, self._generations[group.group_id]
        first = page.page_id * ratio
        page.group_id = group.group_id
        page.blocks = [
            KVCacheBlock(block_id, group.group_id, page, generation=int(generations[block_id]))
            for block_id in range(first, first + ratio)
        ]
        page.free = page.blocks[::-1]
        if ratio > 1:
            group.unheld_with_free[page.page_id] = page
        return page

    def _take_back(self, page: LargePage) -> None:
        """Give up an unheld page's content."""
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
