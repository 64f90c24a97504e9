"""The block tables of one KV-cache group: what every layer type must answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from prefix_cache.block import KVCacheBlock
from prefix_cache.block_hash import BlockHash
from prefix_cache.block_pool import BlockPool
from prefix_cache.kv_cache_spec import KVCacheSpec

__all__ = ["SingleTypeKVCacheManager"]


class SingleTypeKVCacheManager(ABC):
    """Keeps one block table per request, for the layers of one group.

    A table grows at its end only and index ``position // block_size`` is the block of a position
    for as long as the request lives. Which blocks a hit needs, and which a request still needs,
    depends on the layer type: that is what subclasses answer.

    Args:
        spec: what the layers of the group keep.
        pool: shared with the other groups.
        group_id: the group's index in ``KVCacheConfig.groups``.

    Attributes:
        block_tables: request id to its blocks; for reading only.
    """

    def __init__(self, spec: KVCacheSpec, pool: BlockPool, group_id: int) -> None:
        self.spec = spec
        self.pool = pool
        self.group_id = group_id
        self.block_size = spec.block_size
        self.block_tables: dict[str, list[KVCacheBlock]] = {}
        # Leading blocks per request whose content is settled: adopted, or already published.
        self._num_published: dict[str, int] = {}

    @abstractmethod
    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_num_tokens: int
    ) -> list[KVCacheBlock]:
        """The blocks of the longest cached prefix this group can serve alone.

        Changes nothing and takes no reference: the answer holds until the next call that
        allocates, publishes or resets.

        Args:
            block_hashes: of the sequence's full blocks, from its start.
            max_num_tokens: the hit is at most this long (rounded down to whole blocks).
        """

    @abstractmethod
    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a request of ``num_tokens`` holds in this group. Changes nothing."""

    @abstractmethod
    def num_blocks_needed(self, request_id: str, num_tokens: int) -> int:
        """New blocks the request's table lacks to hold ``num_tokens`` in all. Changes nothing.

        An unknown request has an empty table.
        """

    @abstractmethod
    def allocate(self, request_id: str, num_tokens: int) -> None:
        """Grow the request's table to hold ``num_tokens`` in all; an unknown request begins one.

        May evict cached blocks. Shrinks nothing.

        Raises:
            ValueError: if the pool has too few blocks; nothing has changed then.
        """

    @abstractmethod
    def publish(
        self, request_id: str, block_hashes: Sequence[BlockHash], num_computed_tokens: int
    ) -> None:
        """Let blocks that are full and computed be found. Call it after the step that wrote them.

        Args:
            request_id: a request that holds blocks.
            block_hashes: of the request's full blocks, from its start; may be longer than needed.
            num_computed_tokens: tokens whose rows are written.
        """

    def adopt(self, request_id: str, blocks: Sequence[KVCacheBlock]) -> None:
        """Begin a request's table with the blocks of a hit, taking one reference to each.

        Raises:
            ValueError: if the request has a table already, or a block's content is gone.
        """
        if request_id in self.block_tables:
            raise ValueError(f"request {request_id!r} has a block table already")
        for block in blocks:
            self.pool.touch(block)
        self.block_tables[request_id] = list(blocks)
        self._num_published[request_id] = len(blocks)

    def free(self, request_id: str) -> None:
        """Give back all blocks of a request, tail first, and forget it. ``ValueError`` if unknown.

        Published blocks stay findable until they are evicted.
        """
        table = self._table(request_id)
        del self.block_tables[request_id], self._num_published[request_id]
        self.pool.release(reversed(table))

    def block_ids(self, request_id: str) -> list[int]:
        """The request's block table as ids, a new list. ``ValueError`` if it is unknown."""
        return [block.block_id for block in self._table(request_id)]

    def _table(self, request_id: str) -> list[KVCacheBlock]:
        table = self.block_tables.get(request_id)
        if table is None:
            raise ValueError(f"request {request_id!r} holds no blocks")
        return table
