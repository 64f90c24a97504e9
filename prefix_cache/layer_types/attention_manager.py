"""Attention that needs all there is: of the tokens before, or of an encoder's output."""

from __future__ import annotations

from collections.abc import Sequence

from prefix_cache.blocks.block import KVCacheBlock
from prefix_cache.blocks.block_hash import BlockHash
from prefix_cache.layer_types.single_type_manager import SingleTypeKVCacheManager

__all__ = ["CrossAttentionManager", "FullAttentionManager"]


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


class CrossAttentionManager(SingleTypeKVCacheManager):
    """Static tables over encoder tokens, filled once; token prefixes do not concern them.

    ``num_tokens`` means encoder tokens in all methods of this class.
    """

    follows_tokens = False

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_num_tokens: int
    ) -> list[KVCacheBlock]:
        """All blocks or none: half an encoder's output is of no use.

        Args:
            block_hashes: of all blocks of the encoder's input, its partial last one included.
            max_num_tokens: encoder tokens.
        """
        hit = [self.pool.lookup(self.group_id, block_hash) for block_hash in block_hashes]
        blocks = [block for block in hit if block is not None]
        whole = len(blocks) == self.max_blocks(max_num_tokens)
        return blocks if whole and len(blocks) == len(hit) else []

    def publish(
        self, request_id: str, block_hashes: Sequence[BlockHash], num_computed_tokens: int
    ) -> None:
        """Let the whole table be found, its partial last block included."""
        table = self.table(request_id)
        if self._num_published[request_id] or len(block_hashes) != len(table):
            return
        for block, block_hash in zip(table, block_hashes, strict=True):
            self.pool.publish(block, block_hash)
        self._num_published[request_id] = len(table)
