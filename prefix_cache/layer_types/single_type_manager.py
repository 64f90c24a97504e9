"""The block tables of one KV-cache group: what every layer type must answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from prefix_cache.blocks.block import KVCacheBlock, LargePage
from prefix_cache.blocks.block_hash import BlockHash
from prefix_cache.blocks.block_pool import HIGH_PRIORITY, LOW_PRIORITY, BlockPool
from prefix_cache.specs.kv_cache_spec import KVCacheSpec

__all__ = ["NEVER", "SingleTypeKVCacheManager"]

NEVER = 2**62
"""More tokens than any request has."""


class SingleTypeKVCacheManager(ABC):
    """Keeps one block table per request, for the layers of one group.

    Index ``position // block_size`` of a table is the block of a position; where the layers need
    none (any more), the null block stands in its place. Which blocks a hit needs, which a request
    still needs (all of them, unless a subclass says otherwise), and what is evicted first depends
    on the layer type: that is what subclasses answer.

    Args:
        spec: what the layers of the group keep.
        pool: shared with the other groups.
        group_id: the group's index in ``KVCacheConfig.groups``.
        max_num_batched_tokens: most tokens of a request that a step runs.

    Attributes:
        block_tables: request id to its blocks; for reading only.
        follows_tokens: whether the group's blocks are those of the request's tokens; if not
            (cross-attention), token prefixes are none of its business.
        keeps_states: whether a hit needs a state that is kept at its very end (recurrent layers).
    """

    follows_tokens: ClassVar[bool] = True
    keeps_states: ClassVar[bool] = False

    def __init__(
        self, spec: KVCacheSpec, pool: BlockPool, group_id: int, max_num_batched_tokens: int
    ) -> None:
        self.spec = spec
        self.pool = pool
        self.group_id = group_id
        self.block_size = spec.block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.null_block = pool.null_block(group_id)
        self.block_tables: dict[str, list[KVCacheBlock]] = {}
        # Leading blocks per request whose content is settled: adopted, or already published.
        self._num_published: dict[str, int] = {}
        # Leading blocks per request that came from a hit: others are likely to want them again.
        self._num_adopted: dict[str, int] = {}
        # Leading blocks per request that were given back already, or were never held.
        self._num_released: dict[str, int] = {}

    @abstractmethod
    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_num_tokens: int
    ) -> list[KVCacheBlock]:
        """The blocks of the longest cached prefix this group can serve alone.

        Changes nothing and takes no reference: valid until the next allocation, publication, reset.

        Args:
            block_hashes: of the sequence's full blocks, from its start.
            max_num_tokens: the hit is at most this long (rounded down to whole blocks).

        Returns:
            One block per ``block_size`` tokens of the hit; the null block where none is needed.
        """

    def max_blocks(self, num_tokens: int) -> int:
        """Most blocks that a request of ``num_tokens`` ever holds at once. Changes nothing."""
        return -(-num_tokens // self.block_size)

    def first_needed_block(self, num_computed_tokens: int) -> int:
        """Index of the first block that the tokens from ``num_computed_tokens`` on can need."""
        return 0

    def next_release(self, num_computed_tokens: int) -> int:
        """Computed tokens, more than these, up to which :meth:`first_needed_block` stays as it is.

        ``NEVER`` if it always does.
        """
        return NEVER

    def num_blocks_needed(
        self, request_id: str, num_tokens: int, num_prefix_blocks: int = 0
    ) -> int:
        """New blocks the request's table lacks to hold ``num_tokens`` in all. Changes nothing.

        Args:
            request_id: an unknown one has an empty table.
            num_tokens: in all, computed ones included.
            num_prefix_blocks: of a hit that the request would adopt first.
        """
        num_held = len(self.block_tables.get(request_id, ())) + num_prefix_blocks
        return max(0, -(-num_tokens // self.block_size) - num_held)

    def num_blocks_to_finish(self, num_tokens: int, num_prefix_tokens: int) -> int:
        """Most new blocks held at once on the way from a cached prefix to ``num_tokens``."""
        num_new = -(-num_tokens // self.block_size) - num_prefix_tokens // self.block_size
        return max(0, min(num_new, self.max_blocks(num_tokens)))

    def extend(self, request_id: str, blocks: Sequence[KVCacheBlock], num_tokens: int) -> None:
        """Put new blocks, as many as :meth:`num_blocks_needed` said, behind the table."""
        self._begin(request_id)
        self.block_tables[request_id].extend(blocks)

    def publish(
        self, request_id: str, block_hashes: Sequence[BlockHash], num_computed_tokens: int
    ) -> None:
        """Let blocks that are full and computed be found. Call it after the step that wrote them.

        Each block is published once, when its last token is computed.

        Args:
            request_id: a request that holds blocks.
            block_hashes: of the request's full blocks, from its start; may be longer than needed.
            num_computed_tokens: tokens whose rows are written.
        """
        table = self.table(request_id)
        first = self._num_published[request_id]
        end = min(num_computed_tokens // self.block_size, len(block_hashes), len(table))
        for index in range(first, end):
            if table[index] is not self.null_block:
                self.pool.publish(table[index], block_hashes[index])
        self._num_published[request_id] = max(first, end)

    def release_unneeded(self, request_id: str, num_computed_tokens: int) -> None:
        """Give back the blocks that no later token of the request can need.

        Their content is evicted first, as only a request that ends where they do could use it; but
        what was found by a hit was of use already, and waits with the rest.
        """
        table = self.block_tables.get(request_id)
        if table is None:
            return
        end = min(self.first_needed_block(num_computed_tokens), len(table))
        first = self._num_released[request_id]
        if end <= first:
            return
        adopted = max(first, min(self._num_adopted.get(request_id, 0), end))
        self.pool.release(table[first:adopted], HIGH_PRIORITY)
        self.pool.release(table[adopted:end], LOW_PRIORITY)
        table[first:end] = [self.null_block] * (end - first)
        self._num_released[request_id] = end

    def adopt(self, request_id: str, blocks: Sequence[KVCacheBlock]) -> None:
        """Begin a request's table with the blocks of a hit, taking one reference to each.

        Raises:
            ValueError: if the request has a table already, or a block's content is gone.
        """
        if request_id in self.block_tables:
            raise ValueError(f"request {request_id!r} has a block table already")
        for block in blocks:
            if block is not self.null_block:
                self.pool.touch(block)
        self._begin(request_id)
        self.block_tables[request_id] = list(blocks)
        self._num_published[request_id] = self._num_adopted[request_id] = len(blocks)

    def free(self, request_id: str) -> None:
        """Give back all blocks of a request, tail first, and forget it. ``ValueError`` if unknown.

        Published blocks stay findable until they are evicted.
        """
        table = self.table(request_id)
        del self.block_tables[request_id]
        del self._num_published[request_id], self._num_released[request_id]
        self._num_adopted.pop(request_id, None)
        self.pool.release(reversed(table))

    def block_ids(self, request_id: str, first: int = 0, end: int | None = None) -> list[int]:
        """Ids of the blocks ``[first, end)`` of a request's table. ``ValueError`` if unknown."""
        return [block.block_id for block in self.table(request_id)[first:end]]

    def restore(self, request_id: str, blocks: Sequence[KVCacheBlock]) -> None:
        """Begin a request's table with blocks held for it whose content was brought back.

        They cannot be found yet: the next call of :meth:`publish` lets them.

        Raises:
            ValueError: if the request has a table already.
        """
        if request_id in self.block_tables:
            raise ValueError(f"request {request_id!r} has a block table already")
        self._begin(request_id)
        self.block_tables[request_id] = list(blocks)

    def last_page(self, request_id: str) -> LargePage | None:
        """The large page of the request's last block, near which new ones should lie."""
        table = self.block_tables.get(request_id)
        return table[-1].large_page if table else None

    def _begin(self, request_id: str) -> None:
        if request_id not in self.block_tables:
            self.block_tables[request_id] = []
            self._num_published[request_id] = 0
            self._num_released[request_id] = 0

    def table(self, request_id: str) -> Sequence[KVCacheBlock]:
        """The request's blocks, null blocks included; for reading. ``ValueError`` if unknown."""
        table = self.block_tables.get(request_id)
        if table is None:
            raise ValueError(f"request {request_id!r} holds no blocks")
        return table
