"""Who holds which block, which blocks can be found by their content, and who is evicted next.

A block is in exactly one state::

    free ──allocate──► held ──release──► free      (without a hash: nothing worth keeping)
      ▲                 ▲ └────release──► cached   (with a hash)
      │                 └─────touch────────┘ │
      └──── allocate evicts the LRU one ─────┘
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from prefix_cache.block import FreeBlockQueue, KVCacheBlock
from prefix_cache.block_hash import BlockHash

__all__ = ["BlockPool"]


class BlockPool:
    """All blocks of one engine.

    Block 0 is the null block: it pads block tables, belongs to nobody, and is never handed out.

    Args:
        num_blocks: the null block included.

    Attributes:
        blocks: every block, by its id.
        null_block: block 0.
        free_queue: free blocks without a hash; handed out first, the last one freed first, so
            that memory never touched stays untouched for as long as possible.
        cached_queue: blocks with a hash that nobody holds, least recently used first.
        hash_table: (group id, hash) to the one block found by it.
        generations: ``(num_blocks,)`` int64 on the CPU, ``blocks[i].generation`` for all blocks,
            for those who tag rows by the million.
        num_evictions: cached blocks whose content was given up for a new one.

    Attributes are for reading; only the methods change them.

    Raises:
        ValueError: if there is no block beside the null block.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks must be at least 2 (block 0 is the null block), got {num_blocks}"
            )
        self.num_blocks = num_blocks
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.free_queue = FreeBlockQueue()
        for block in self.blocks[1:]:
            self.free_queue.append(block)
        self.cached_queue = FreeBlockQueue()
        self.hash_table: dict[tuple[int, BlockHash], KVCacheBlock] = {}
        self.generations = torch.zeros(num_blocks, dtype=torch.int64)
        # The same memory; element access through numpy is an order of magnitude cheaper.
        self._generations = self.generations.numpy()
        self.num_evictions = 0

    @property
    def num_free(self) -> int:
        """Blocks that :meth:`allocate` could hand out now: the free and the cached ones."""
        return len(self.free_queue) + len(self.cached_queue)

    @property
    def usable_blocks(self) -> int:
        """Blocks that can be held at all: all but the null block."""
        return self.num_blocks - 1

    def lookup(self, group_id: int, block_hash: BlockHash) -> KVCacheBlock | None:
        """Find a block by content. No reference is taken: valid until the next allocation."""
        return self.hash_table.get((group_id, block_hash))

    def allocate(self, group_id: int, num_blocks: int) -> list[KVCacheBlock]:
        """Hand out blocks with one reference each; cached ones lose their hash, LRU first.

        Raises:
            ValueError: if fewer blocks are free; nothing has changed then.
        """
        if num_blocks > self.num_free:
            raise ValueError(f"{num_blocks} blocks wanted, {self.num_free} are free")
        return [self._hand_out(group_id) for _ in range(num_blocks)]

    def touch(self, block: KVCacheBlock) -> None:
        """Take one more reference to a block that was found by its content.

        Raises:
            ValueError: for the null block, and for a block nobody holds that has no hash: its
                content is gone.
        """
        if block is self.null_block:
            raise ValueError("the null block cannot be held")
        if block.ref_cnt == 0:
            if block.block_hash is None:
                raise ValueError(f"block {block.block_id} is free and holds no content to share")
            self.cached_queue.remove(block)
        block.ref_cnt += 1

    def release(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Give back one reference per block.

        Args:
            blocks: in the order in which they should be evicted: give a table in reverse, so that
                the tail goes before the prefix others may still share.

        Raises:
            ValueError: for a block that nobody holds.
        """
        for block in blocks:
            if block.ref_cnt == 0:
                raise ValueError(f"block {block.block_id} is released, but nobody holds it")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                if block.block_hash is None:
                    self.free_queue.prepend(block)
                else:
                    self.cached_queue.append(block)

    def publish(self, block: KVCacheBlock, block_hash: BlockHash) -> None:
        """Let a held block be found by its content. Call it after its rows are written.

        The newest block wins: one that was found by the same hash so far loses it, because a
        block is computed again only when something was missing from the older one.

        Raises:
            ValueError: for a block that nobody holds, or that has another hash already.
        """
        if block.ref_cnt == 0 or block.group_id is None:
            raise ValueError(f"block {block.block_id} is published, but nobody holds it")
        if block.block_hash is not None and block.block_hash != block_hash:
            raise ValueError(f"block {block.block_id} is full and published under another hash")
        older = self.hash_table.get((block.group_id, block_hash))
        if older is block:
            return
        if older is not None:
            older.block_hash = None
            if older.ref_cnt == 0:
                self.cached_queue.remove(older)
                self.free_queue.prepend(older)
        block.block_hash = block_hash
        self.hash_table[(block.group_id, block_hash)] = block

    def reset(self) -> None:
        """Forget all content: no block can be found any more. References stay as they are."""
        for block in self.hash_table.values():
            block.block_hash = None
        self.hash_table.clear()
        while self.cached_queue:
            self.free_queue.append(self.cached_queue.popleft())

    def _hand_out(self, group_id: int) -> KVCacheBlock:
        if self.free_queue:
            block = self.free_queue.popleft()
        else:
            block = self.cached_queue.popleft()
            self._evict(block)
        block.ref_cnt = 1
        block.group_id = group_id
        block.generation += 1
        self._generations[block.block_id] = block.generation
        return block

    def _evict(self, block: KVCacheBlock) -> None:
        if block.block_hash is None or block.group_id is None:
            raise RuntimeError(f"block {block.block_id} waits among the cached without a hash")
        del self.hash_table[(block.group_id, block.block_hash)]
        block.block_hash = None
        self.num_evictions += 1
