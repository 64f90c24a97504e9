"""Full attention: every token needs the keys and values of all tokens before it."""

from __future__ import annotations

from collections.abc import Sequence

from prefix_cache.block import KVCacheBlock
from prefix_cache.block_hash import BlockHash
from prefix_cache.single_type_manager import SingleTypeKVCacheManager

__all__ = ["FullAttentionManager"]


class FullAttentionManager(SingleTypeKVCacheManager):
    """Keeps every block of a request. Hits are closed downward: a shorter one is always a hit."""

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

    def num_blocks_for(self, num_tokens: int) -> int:
        """One block per ``block_size`` tokens begun."""
        return -(-num_tokens // self.block_size)

    def num_blocks_needed(self, request_id: str, num_tokens: int) -> int:
        """Those for ``num_tokens``, less those in the table."""
        num_held = len(self.block_tables.get(request_id, ()))
        return max(0, self.num_blocks_for(num_tokens) - num_held)

    def allocate(self, request_id: str, num_tokens: int) -> None:
        """Append new blocks; see the base class."""
        blocks = self.pool.allocate(self.group_id, self.num_blocks_needed(request_id, num_tokens))
        self.block_tables.setdefault(request_id, []).extend(blocks)
        self._num_published.setdefault(request_id, 0)

    def publish(
        self, request_id: str, block_hashes: Sequence[BlockHash], num_computed_tokens: int
    ) -> None:
        """Publish each block once, when its last token is computed; see the base class."""
        table = self._table(request_id)
        first = self._num_published[request_id]
        end = min(num_computed_tokens // self.block_size, len(block_hashes), len(table))
        for block, block_hash in zip(table[first:end], block_hashes[first:end], strict=True):
            self.pool.publish(block, block_hash)
        self._num_published[request_id] = max(first, end)
