"""Recurrent layers: one state per request, and kept copies of it where a hit can go on."""

from __future__ import annotations

from collections.abc import Sequence

from prefix_cache.blocks.block import KVCacheBlock
from prefix_cache.blocks.block_hash import BlockHash
from prefix_cache.blocks.block_pool import HIGH_PRIORITY, BlockPool
from prefix_cache.layer_types.single_type_manager import SingleTypeKVCacheManager
from prefix_cache.specs.kv_cache_spec import KVCacheSpec

__all__ = ["MambaManager"]


class MambaManager(SingleTypeKVCacheManager):
    """A page is the state after some token; the table holds it at that token's block.

    While a request runs inside of a block, its state is overwritten in place. A step that ends
    beyond that block writes to a new page, and the old one can be given back: if its block was
    full, it is the state after the block's last token and stays findable under the block's hash.
    Blocks of 4, steps of 6, 2, 1 and 4 tokens::

        after token   table              findable
        6             -  A               nothing (the step ended inside of block 1)
        8             -  A               A, for a prefix of 8 tokens
        9             -  A  B            A; given back by the next step
        13            -  -  B  C         A; B is lost, it never was the state after a full block

    A hit is a state kept at its very end, so steps of a prefill should end where hits are likely;
    see :meth:`keep`. Other states are evicted first, but for the request's latest.
    """

    keeps_states = True

    def __init__(
        self, spec: KVCacheSpec, pool: BlockPool, group_id: int, max_num_batched_tokens: int
    ) -> None:
        super().__init__(spec, pool, group_id, max_num_batched_tokens)
        # Per request, indices of blocks whose state is worth more than an intermediate one.
        self._kept: dict[str, frozenset[int]] = {}
        # Per request, its last state that was given back, with the hash that it had then.
        self._latest: dict[str, tuple[KVCacheBlock, BlockHash]] = {}

    def keep(self, request_id: str, ends: Sequence[int]) -> None:
        """Say where a request's states are worth keeping: after so many tokens, whole blocks."""
        kept = {end // self.block_size - 1 for end in ends}
        self._kept[request_id] = self._kept.get(request_id, frozenset()) | kept

    def adopt(self, request_id: str, blocks: Sequence[KVCacheBlock]) -> None:
        """See the base class; the state of a hit is kept: what was shared once may be again."""
        super().adopt(request_id, blocks)
        self._kept[request_id] = frozenset({len(blocks) - 1})

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_num_tokens: int
    ) -> list[KVCacheBlock]:
        """The last block whose state is kept; those before it are not needed."""
        end = min(max_num_tokens // self.block_size, len(block_hashes))
        for index in reversed(range(end)):
            block = self.pool.lookup(self.group_id, block_hashes[index])
            if block is not None:
                return [self.null_block] * index + [block]
        return []

    def max_blocks(self, num_tokens: int) -> int:
        """The state that a step reads, and the one that it writes."""
        return min(-(-num_tokens // self.block_size), 2)

    def first_needed_block(self, num_computed_tokens: int) -> int:
        """The block of the last token computed: its state is what goes on."""
        return max(0, num_computed_tokens - 1) // self.block_size

    def next_release(self, num_computed_tokens: int) -> int:
        """The first token of the next block."""
        return (self.first_needed_block(num_computed_tokens) + 1) * self.block_size + 1

    def num_blocks_needed(
        self, request_id: str, num_tokens: int, num_prefix_blocks: int = 0
    ) -> int:
        """One, if the last token lies beyond the table."""
        return min(1, super().num_blocks_needed(request_id, num_tokens, num_prefix_blocks))

    def extend(self, request_id: str, blocks: Sequence[KVCacheBlock], num_tokens: int) -> None:
        """The new page stands for the last token's block; blocks in between have no state."""
        self._begin(request_id)
        if blocks:
            table = self.block_tables[request_id]
            skipped = -(-num_tokens // self.block_size) - len(table) - 1
            table.extend([self.null_block] * skipped)
            table.extend(blocks)

    def publish(
        self, request_id: str, block_hashes: Sequence[BlockHash], num_computed_tokens: int
    ) -> None:
        """Publish the state if the step ended with its block; others are not states of a hit."""
        end, rest = divmod(num_computed_tokens, self.block_size)
        table = self.table(request_id)
        is_new = self._num_published[request_id] < end <= min(len(block_hashes), len(table))
        if rest == 0 and is_new and table[end - 1] is not self.null_block:
            self.pool.publish(table[end - 1], block_hashes[end - 1])
        self._num_published[request_id] = max(self._num_published[request_id], end)

    def free(self, request_id: str) -> None:
        """See the base class; the last state is what the next turn of a conversation continues."""
        if any(block.block_hash is not None for block in self.table(request_id)):
            self._demote_latest(request_id)  # there is a later one in the table
        super().free(request_id)
        self._kept.pop(request_id, None)
        self._latest.pop(request_id, None)

    def release_unneeded(self, request_id: str, num_computed_tokens: int) -> None:
        """Give back the state that the request has moved on from.

        While it is the last one at the end of a block it is what the next turn of a conversation
        would continue; once there is a later one it is evicted first, unless it was to be kept.
        """
        table = self.block_tables.get(request_id)
        if table is None:
            return
        end = min(self.first_needed_block(num_computed_tokens), len(table))
        for index in range(self._num_released[request_id], end):
            block, block_hash = table[index], table[index].block_hash
            if block is self.null_block:
                continue
            self.pool.release([block], HIGH_PRIORITY)
            if block_hash is None:
                continue
            self._demote_latest(request_id)
            if index not in self._kept.get(request_id, ()):
                self._latest[request_id] = (block, block_hash)
        first = self._num_released[request_id]
        table[first:end] = [self.null_block] * max(0, end - first)
        self._num_released[request_id] = max(first, end)

    def _demote_latest(self, request_id: str) -> None:
        block, block_hash = self._latest.pop(request_id, (self.null_block, None))
        if block_hash is not None and block.block_hash == block_hash:
            self.pool.demote(block)
