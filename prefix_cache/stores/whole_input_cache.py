"""Cache of encoder outputs, keyed by the whole input.

Every row of an encoder depends on its entire input, so prefixes are useless: a hit is the whole
input or nothing. Its blocks share a pool with those of prefixes; only the keys differ::

    input of length 10, block_size 4     [ b0: 4 rows ] [ b1: 4 rows ] [ b2: 2 rows, rest unused ]
                                     key: (whole, 0, 10) (whole, 1, 10) (whole, 2, 10)

The last block may be partly filled, because only inputs that are entirely equal share it. This
cache holds texts of an encoder engine and items of towers; cross-attention finds its blocks by the
same keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefix_cache.blocks.block import BlockHash, KVCacheBlock, whole_input_block_hashes
from prefix_cache.blocks.block_pool import BlockPool
from prefix_cache.stores.stage_output_cache import StageOutputCache


@dataclass(eq=False)
class WholeInputCache:
    """Cache of whole inputs in one group of a pool.

    Life cycle of an input: :meth:`find`; on a miss :meth:`allocate`, run the encoder, write its
    output, :meth:`publish`; in either case read, then :meth:`release`.

    Attributes:
        pool: pool that allocates the blocks.
        stage_outputs: mirrored rows of the blocks, of which a hit requires all wanted ones; None if
            there are only blocks.
        block_size: length of input per block, in tokens or bytes.
        group_id: group of the blocks.
        max_blocks: maximum number of held and cached blocks together, enforced by :meth:`has_room`
            only; None: limited by the pool.
    """

    pool: BlockPool
    stage_outputs: StageOutputCache | None
    block_size: int
    group_id: int = 0
    max_blocks: int | None = None

    def num_blocks_for(self, length: int) -> int:
        """Return the number of blocks for an input. ``ValueError`` if it is empty."""
        if length < 1:
            raise ValueError(f"an input has a length of at least 1, got {length}")
        return -(-length // self.block_size)

    def has_room(self, num_blocks: int, others: Mapping[int, int]) -> bool:
        """Return True if ``num_blocks`` more blocks fit, together with ``others`` per group.

        Evicts cached blocks of this group as ``max_blocks`` requires.
        """
        if not self.pool.can_allocate({**others, self.group_id: num_blocks}):
            return False
        if self.max_blocks is None:
            return True
        room = self.max_blocks - self.pool.num_held(self.group_id) - num_blocks
        for _ in range(self.pool.num_cached(self.group_id) - room if room >= 0 else 0):
            self.pool.evict(self.group_id)
        return room >= 0

    def find(self, input_hash: BlockHash, length: int) -> list[KVCacheBlock] | None:
        """Find the blocks of an input whose wanted rows are all cached, or return None.

        Adds a reference to each block: free them with :meth:`release`.

        Args:
            input_hash: see :func:`prefix_cache.blocks.block.whole_input_hash`.
        """
        keys = whole_input_block_hashes(input_hash, length, self.block_size)
        blocks = self.pool.lookup_all(self.group_id, keys)
        if blocks is None:
            return None
        if self.stage_outputs is not None:
            block_ids = [block.block_id for block in blocks]
            if self.stage_outputs.num_valid_rows(block_ids) < length:
                return None
        self.hold(blocks)
        return blocks

    def hold(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add a reference to each of some held or cached blocks."""
        for block in blocks:
            self.pool.touch(block)

    def allocate(self, length: int, keep: Mapping[int, int] | None = None) -> list[KVCacheBlock]:
        """Allocate new blocks for an input, with one reference each.

        Args:
            keep: see :meth:`BlockPool.allocate`.

        Raises:
            ValueError: if the input is empty or too few blocks are free; nothing has changed then.
        """
        num_blocks = self.num_blocks_for(length)
        free = self.pool.num_free(self.group_id)
        if num_blocks > free:
            raise ValueError(
                f"an input of length {length} needs {num_blocks} blocks of {self.block_size}, "
                f"{free} are free now"
            )
        return self.pool.allocate({self.group_id: num_blocks}, keep=keep)[self.group_id]

    def publish(self, input_hash: BlockHash, length: int, blocks: Sequence[KVCacheBlock]) -> None:
        """Make an input findable. Call it after its rows are written.

        Raises:
            ValueError: if the number of blocks does not match the input.
        """
        keys = list(whole_input_block_hashes(input_hash, length, self.block_size))
        if len(blocks) != len(keys):
            raise ValueError(
                f"an input of length {length} takes {len(keys)} blocks, got {len(blocks)}"
            )
        for block, key in zip(blocks, keys, strict=True):
            self.pool.publish(block, key)

    def release(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Drop one reference per block; published blocks stay cached until they are evicted."""
        self.pool.release(reversed(blocks))
