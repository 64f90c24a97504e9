"""One block of the pool, and the queue in which blocks wait to be handed out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from prefix_cache.block_hash import BlockHash

__all__ = ["FreeBlockQueue", "KVCacheBlock"]


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """Bookkeeping of one block. Compared by identity; changed by the :class:`BlockPool` only.

    Attributes:
        block_id: the block's place in the pool; ``slot = block_id * block_size + offset``.
        ref_cnt: block tables that hold the block. At 0 it waits in a queue of the pool.
        group_id: the KV-cache group it was last handed out for.
        block_hash: set while the block can be found by its content.
        generation: how often the block was handed out; 0 means never. What was written for an
            earlier generation is not this block's content.
    """

    block_id: int
    ref_cnt: int = 0
    group_id: int | None = None
    block_hash: BlockHash | None = None
    generation: int = 0


class FreeBlockQueue:
    """Blocks that nobody holds, in the order in which they will be handed out.

    Every operation is O(1), removal from the middle included: a hit takes a block from wherever
    it waits.
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, KVCacheBlock] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[KVCacheBlock]:
        return iter(self._blocks.values())

    def __contains__(self, block: KVCacheBlock) -> bool:
        return block.block_id in self._blocks

    def popleft(self) -> KVCacheBlock:
        """Take the block that is next to be handed out. ``KeyError`` when empty."""
        return self._blocks.popitem(last=False)[1]

    def append(self, block: KVCacheBlock) -> None:
        """Put a block last."""
        self._blocks[block.block_id] = block

    def prepend(self, block: KVCacheBlock) -> None:
        """Put a block first."""
        self._blocks[block.block_id] = block
        self._blocks.move_to_end(block.block_id, last=False)

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block from wherever it is. ``KeyError`` when it is not here."""
        del self._blocks[block.block_id]
