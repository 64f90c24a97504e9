"""One block (a small page), and the large page that it is part of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from prefix_cache.blocks.block_hash import BlockHash

__all__ = ["EvictionKey", "IntegrityError", "KVCacheBlock", "LargePage"]


class IntegrityError(RuntimeError):
    """Two records of the same fact differ; the message prints both with their numbers."""


EvictionKey = tuple[int, int]
"""Priority, then time of last use: what compares smaller is evicted first."""


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """Bookkeeping of one block. Compared by identity; changed by the :class:`BlockPool` only.

    Attributes:
        block_id: the block's place among its group's; ``slot = block_id * block_size + offset``.
        group_id: the KV-cache group it serves for as long as its large page does.
        large_page: the page it is part of; None for the null block.
        ref_cnt: block tables that hold the block. At 0 it waits in a queue of the pool.
        block_hash: set while the block can be found by its content.
        generation: how often the block id was handed out; 0 means never. What was written for an
            earlier generation is not this block's content.
        key: when it was last given back; meaningful while no table holds it.
    """

    block_id: int
    group_id: int
    large_page: LargePage | None
    ref_cnt: int = 0
    block_hash: BlockHash | None = None
    generation: int = 0
    key: EvictionKey = (0, 0)


@dataclass(slots=True, eq=False)
class LargePage:
    """A large page: free, or cut into the blocks of one group.

    Attributes:
        page_id: its place in the buffer.
        group_id: whom it serves; None while it is free.
        blocks: all its blocks, in order; empty while it is free.
        free: those among them that are neither held nor hold content; the last is next.
        num_held: those among them that tables hold.
        key: highest priority of its content, and when it came to be held by no table.
    """

    page_id: int
    group_id: int | None = None
    blocks: list[KVCacheBlock] = field(default_factory=list)
    free: list[KVCacheBlock] = field(default_factory=list)
    num_held: int = 0
    key: EvictionKey = (0, 0)

    @property
    def cached(self) -> Iterator[KVCacheBlock]:
        """Blocks that no table holds but that can be found by their content."""
        return (b for b in self.blocks if b.ref_cnt == 0 and b.block_hash is not None)
