"""How often each block is held, which can be found by their content, and which is evicted next.

A block is in exactly one state::

    free ──allocate──► held ──release──► free      (without a hash: nothing worth keeping)
      ▲                 ▲ └────release──► cached   (with a hash)
      │                 └─────touch────────┘ │
      └──── allocate evicts the LRU one ─────┘

Blocks are cut from large pages, which go from one group to another; see
:mod:`prefix_cache.blocks.page_arena`.

Two requests may compute the same content, each in a block of its own. The newest is the one found,
because a block is computed again only when something was missing from the older one. The older ones
stay while requests hold them, and are found again when the newest is evicted::

    hash ──► newest (held, or cached)      content that no table holds is kept once: an older block
      └────► older ones (all held)         that is given back is free, the newest counts as used now
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from prefix_cache.blocks.block import KVCacheBlock, LargePage
from prefix_cache.blocks.block_hash import BlockHash
from prefix_cache.blocks.page_arena import PageArena
from prefix_cache.specs.kv_cache_config import KVCacheConfig

__all__ = ["HIGH_PRIORITY", "LOW_PRIORITY", "BlockPool"]

LOW_PRIORITY = 0
"""For content that a later hit hardly needs: it is evicted before all other content."""
HIGH_PRIORITY = 1
_MOST_EVICTED = 2**16
"""Hashes of evicted blocks that are remembered, those of about a million tokens."""


class BlockPool:
    """All blocks of one engine.

    Block 0 of every group is its null block: it pads block tables and is never handed out.

    Args:
        arenas: where the pages are; every group lives in one of them.

    Attributes:
        hash_tables: per group, hash to the block found by it: the newest of that content.
        older: (group id, hash) to held blocks of that content, the newest last; never empty.
        num_evictions: cached blocks whose content was given up for a new one.

    Attributes are for reading; only the methods change them.
    """

    def __init__(self, arenas: Sequence[PageArena]) -> None:
        self.arenas = tuple(arenas)
        self.older: dict[tuple[int, BlockHash], list[KVCacheBlock]] = {}
        self.num_evictions = 0
        self._evicted: OrderedDict[BlockHash, None] = OrderedDict()
        self._arena_of = {g: arena for arena in self.arenas for g in arena.groups}
        self.hash_tables: dict[int, dict[BlockHash, KVCacheBlock]] = {g: {} for g in self._arena_of}

    @classmethod
    def uniform(cls, num_blocks: int) -> BlockPool:
        """A pool of one group, number 0.

        Args:
            num_blocks: the null block included.

        Raises:
            ValueError: if there is no block beside the null block.
        """
        return cls([PageArena(num_blocks, {0: 1})])

    @classmethod
    def for_config(cls, config: KVCacheConfig) -> BlockPool:
        """One arena for the groups on the device, one for each on the host."""
        groups = range(len(config.groups))
        on_device = {
            g: config.pages_per_large_page(g) for g in groups if config.groups[g].on_device
        }
        on_host = [g for g in groups if not config.groups[g].on_device]
        return cls(
            [
                PageArena(config.num_large_pages, on_device),
                *(PageArena(config.num_host_blocks, {g: 1}) for g in on_host),
            ]
        )

    def null_block(self, group_id: int) -> KVCacheBlock:
        """Block 0 of a group."""
        return self._arena_of[group_id].groups[group_id].null_block

    def generations(self, group_id: int) -> Tensor:
        """``(num_blocks,)`` int64 on the CPU: how often each block of a group was handed out."""
        return self._arena_of[group_id].groups[group_id].generations

    def num_free(self, group_id: int = 0) -> int:
        """Blocks that the group could have now if no other group took any."""
        arena = self._arena_of[group_id]
        group = arena.groups[group_id]
        return group.num_spare + arena.num_available * group.blocks_per_page

    def usable_blocks(self, group_id: int = 0) -> int:
        """Blocks that the group could hold at all: all but those of the null page."""
        arena = self._arena_of[group_id]
        return (len(arena.pages) - 1) * arena.groups[group_id].blocks_per_page

    def fits(self, counts: Mapping[int, int]) -> bool:
        """Whether the groups could hold so many blocks if all were free."""
        return all(arena.pages_for(counts) < len(arena.pages) for arena in self.arenas)

    def lookup(self, group_id: int, block_hash: BlockHash) -> KVCacheBlock | None:
        """Find a block by content. No reference is taken: valid until the next allocation."""
        return self.hash_tables[group_id].get(block_hash)

    def was_evicted(self, block_hash: BlockHash) -> bool:
        """Whether a block of this content is known to have been evicted; one may be there again."""
        return block_hash in self._evicted

    def can_allocate(self, needs: Mapping[int, int], revived: Iterable[KVCacheBlock] = ()) -> bool:
        """Whether :meth:`allocate` would succeed. Changes nothing.

        Args:
            needs: new blocks per group.
            revived: blocks of a hit that would be touched first. Those that no table holds count
                as free, yet touching them is what uses them up.
        """
        unheld = {block for block in revived if block.ref_cnt == 0}
        for arena in self.arenas:
            demand = {g: needs.get(g, 0) for g in arena.groups}
            pages: set[int] = set()
            for block in unheld:
                if block.group_id not in demand or block.large_page is None:
                    continue
                page = block.large_page
                demand[block.group_id] += 1
                if not page.num_held and page.page_id not in pages:
                    # The page comes with its other blocks, which the group may then use.
                    pages.add(page.page_id)
                    demand[block.group_id] -= arena.groups[block.group_id].blocks_per_page
            if not arena.can_allocate(demand, len(pages)):
                return False
        return True

    def allocate(
        self, needs: Mapping[int, int], near: Mapping[int, LargePage | None] | None = None
    ) -> dict[int, list[KVCacheBlock]]:
        """Hand out blocks with one reference each; content goes as the evictions' order says.

        Args:
            needs: new blocks per group.
            near: per group, the large page that new blocks should lie in.

        Returns:
            Per group of ``needs``, its blocks.

        Raises:
            ValueError: if there are too few blocks; nothing has changed then.
        """
        if not self.can_allocate(needs):
            wanted = {g: count for g, count in needs.items() if count}
            free = {g: self.num_free(g) for g in wanted}
            raise ValueError(f"blocks wanted per group {wanted}, free are at most {free}")
        rest = dict(needs)
        blocks: dict[int, list[KVCacheBlock]] = {group_id: [] for group_id in needs}
        for group_id, count in needs.items():
            page = near.get(group_id) if near else None
            for _ in range(count):
                block = self._take(group_id, page, rest)
                rest[group_id] -= 1
                page = block.large_page
                blocks[group_id].append(block)
        return blocks

    def touch(self, block: KVCacheBlock) -> None:
        """Take one more reference to a block that was found by its content.

        Raises:
            ValueError: for the null block, and for a block whose content is gone.
        """
        if block.large_page is None:
            raise ValueError("the null block cannot be held")
        if block.ref_cnt:
            block.ref_cnt += 1
            return
        if block.block_hash is None:
            raise ValueError(f"block {block.block_id} is free and holds no content to share")
        self._arena_of[block.group_id].hold(block)

    def release(self, blocks: Iterable[KVCacheBlock], priority: int = HIGH_PRIORITY) -> None:
        """Give back one reference per block; null blocks are passed over.

        Args:
            blocks: in the order in which they should be evicted: give a table in reverse, so that
                the tail goes before the prefix others may still share.
            priority: of their content, where they have any and no other table holds them.

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
            elif self.older and block.block_hash is not None:
                self._release_one_of_several(block, block.block_hash, priority)
            else:
                self._arena_of[block.group_id].release(block, priority)

    def demote(self, block: KVCacheBlock) -> None:
        """Let a cached block be evicted before others; one that is held, or free, is left alone."""
        if block.ref_cnt == 0 and block.block_hash is not None:
            self._arena_of[block.group_id].demote(block, LOW_PRIORITY)

    def publish(self, block: KVCacheBlock, block_hash: BlockHash) -> None:
        """Let a held block be found by its content. Call it after its rows are written.

        The newest block wins, because a block is computed again only when something was missing
        from the older one. That one is free now if no table holds it; if one does, it is found
        again once the newest is gone.

        Raises:
            ValueError: for a block that no table holds, or that has another hash already.
        """
        if block.ref_cnt == 0:
            raise ValueError(f"block {block.block_id} is published, but not held")
        if block.block_hash is not None:
            if block.block_hash != block_hash:
                raise ValueError(f"block {block.block_id} is full and published under another hash")
            return
        found = self.hash_tables[block.group_id]
        older = found.get(block_hash)
        if older is not None:
            if older.ref_cnt:
                self.older.setdefault((block.group_id, block_hash), []).append(older)
            else:
                older.block_hash = None
                self._arena_of[older.group_id].drop_content(older)
        block.block_hash = block_hash
        found[block_hash] = block

    def reset(self) -> None:
        """Forget all content: no block can be found any more. References stay as they are."""
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

    def _release_one_of_several(
        self, block: KVCacheBlock, block_hash: BlockHash, priority: int
    ) -> None:
        """Give a block back that may be one of several of equal content: the newest is kept."""
        key = (block.group_id, block_hash)
        arena = self._arena_of[block.group_id]
        newest = self.hash_tables[block.group_id][block_hash]
        if block is newest:
            arena.release(block, priority)
            return
        self._forget_older(key, block)
        block.block_hash = None
        arena.release(block, priority)
        if newest.ref_cnt == 0:
            # The content was in use until now, so it waits as what was given back now.
            priority = max(priority, newest.key[0])
            arena.hold(newest)
            arena.release(newest, priority)

    def _forget_older(self, key: tuple[int, BlockHash], block: KVCacheBlock) -> None:
        self.older[key].remove(block)
        if not self.older[key]:
            del self.older[key]

    def _take(self, group_id: int, near: LargePage | None, rest: Mapping[int, int]) -> KVCacheBlock:
        """One block, leaving enough whole pages for the rest of an allocation."""
        arena = self._arena_of[group_id]
        may_take_page = (
            sum(rest.values()) < arena.num_available  # no block takes more than a page
            or arena.groups[group_id].pages_needed(rest[group_id]) > 0
            or sum(pages.pages_needed(rest.get(g, 0)) for g, pages in arena.groups.items())
            < arena.num_available
        )
        block, evicted = arena.take(group_id, near, may_take_page)
        for old in evicted:
            if old.block_hash is not None:
                self._forget_newest(old.group_id, old.block_hash)
                self._evicted[old.block_hash] = None
                if len(self._evicted) > _MOST_EVICTED:
                    self._evicted.popitem(last=False)
                old.block_hash = None
                self.num_evictions += 1
        return block

    def _forget_newest(self, group_id: int, block_hash: BlockHash) -> None:
        """The newest block of a content is evicted; an older one that is held is found from now on.

        No table holds what is evicted, and of what no table holds only the newest has a hash.
        """
        others = self.older.get((group_id, block_hash))
        if others is None:
            del self.hash_tables[group_id][block_hash]
            return
        self.hash_tables[group_id][block_hash] = others.pop()
        if not others:
            del self.older[group_id, block_hash]
