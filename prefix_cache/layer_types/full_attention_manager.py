"""Full attention: every token needs the keys and values of all tokens before it."""

from __future__ import annotations

from collections.abc import Sequence

from prefix_cache.blocks.block import KVCacheBlock
from prefix_cache.blocks.block_hash import BlockHash
from prefix_cache.layer_types.single_type_manager import SingleTypeKVCacheManager

__all__ = ["FullAttentionManager"]


class FullAttentionManager(SingleTypeKVCacheManager):
    """Keeps every block of a request. Hits are closed downward: a shorter one is always a hit.

    It also serves host-only groups, whose block ids place the outputs of every token.
    """

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_num_tokens: int
    ) -> list[KVCacheBlock]:
        """Scan from the left up to the first block that is not cached."""
        hit: list[KVCacheBlock] = []
        for block_hash in block_hashes[: max_num_tokens // self.block_size]:
            block = self.pool.lookup(self.group_id, block_hash)
            if block is None:
                break
            hit.append(block)
        return hit
