"""Sliding windows and attention chunks: a token needs the tokens of its own neighbourhood only."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from prefix_cache.blocks.block import KVCacheBlock
from prefix_cache.blocks.block_hash import BlockHash
from prefix_cache.layer_types.single_type_manager import SingleTypeKVCacheManager
from prefix_cache.specs.kv_cache_spec import ChunkedLocalAttentionSpec, SlidingWindowSpec

__all__ = ["ChunkedLocalAttentionManager", "LocalAttentionManager", "SlidingWindowManager"]


class LocalAttentionManager(SingleTypeKVCacheManager):
    """Keeps the blocks that the next token can see, and gives the others back as it moves on.

    A hit needs only the blocks that the token after it sees. Window 6, blocks of 4, a hit of 12
    tokens: token 12 sees 7 to 12, which lie in blocks 1 and 2::

        block   | 0       | 1       | 2       |
        tokens  | 0 1 2 3 | 4 5 6 7 | 8 9 . . | 12
        hit     | null    | cached  | cached  |
    """

    @abstractmethod
    def first_visible_token(self, position: int) -> int:
        """The first token that the token at ``position`` sees."""

    @property
    @abstractmethod
    def reach(self) -> int:
        """Most tokens that a token sees, itself included."""

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_num_tokens: int
    ) -> list[KVCacheBlock]:
        """Look for the last blocks first; a gap ends every hit that reaches over it."""
        end = min(max_num_tokens // self.block_size, len(block_hashes))
        while end > 0:
            first = self.first_needed_block(end * self.block_size)
            hit: list[KVCacheBlock] = []
            for index in reversed(range(first, end)):
                block = self.pool.lookup(self.group_id, block_hashes[index])
                if block is None:
                    break
                hit.append(block)
            if len(hit) == end - first:
                return [self.null_block] * first + hit[::-1]
            # The block before those found is missing: no hit can hold it.
            end -= len(hit) + 1
        return []

    def max_blocks(self, num_tokens: int) -> int:
        """What a step's tokens and all that the first of them sees can spread over."""
        span = self.reach - 1 + self.max_num_batched_tokens
        spread = (span + self.block_size - 2) // self.block_size + 1
        return min(-(-num_tokens // self.block_size), spread)

    def first_needed_block(self, num_computed_tokens: int) -> int:
        """The block of the first token that the next one sees."""
        return self.first_visible_token(num_computed_tokens) // self.block_size


class SlidingWindowManager(LocalAttentionManager):
    """Layers in which a token sees the last ``spec.window`` tokens, itself included."""

    spec: SlidingWindowSpec

    @property
    def reach(self) -> int:
        """The window."""
        return self.spec.window

    def first_visible_token(self, position: int) -> int:
        """``position - window + 1``, or the start."""
        return max(0, position - self.spec.window + 1)

    def next_release(self, num_computed_tokens: int) -> int:
        """When the window's first token is that of the next block."""
        next_block = self.first_needed_block(num_computed_tokens) + 1
        return next_block * self.block_size + self.spec.window - 1


class ChunkedLocalAttentionManager(LocalAttentionManager):
    """Layers in which a token sees its chunk of ``spec.chunk_size`` tokens, up to itself."""

    spec: ChunkedLocalAttentionSpec

    @property
    def reach(self) -> int:
        """The chunk."""
        return self.spec.chunk_size

    def first_visible_token(self, position: int) -> int:
        """The start of the chunk."""
        return position // self.spec.chunk_size * self.spec.chunk_size

    def next_release(self, num_computed_tokens: int) -> int:
        """The start of the next chunk."""
        return (num_computed_tokens // self.spec.chunk_size + 1) * self.spec.chunk_size
