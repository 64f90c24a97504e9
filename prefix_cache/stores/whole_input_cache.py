"""What encoders made, found by the whole of their input.

Every row of an encoder depends on all of its input, so a prefix says nothing: a hit is the whole
input or none of it. Its blocks live in a pool beside those of prefixes; only keys differ::

    input of length 10, block_size 4     [ b0: 4 rows ] [ b1: 4 rows ] [ b2: 2 rows, rest unused ]
                                     key: (whole, 0, 10) (whole, 1, 10) (whole, 2, 10)

The last block may be partly filled: it is shared only by inputs that are equal in whole. Texts of
an encoder engine and items of towers are kept here, and cross-attention finds its blocks by the
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
    """Blocks of whole inputs, in one group of a pool.

    The life of an input: :meth:`find`; on a miss :meth:`allocate`, run the encoder, write what it
    made, :meth:`publish`; in either case read, then :meth:`release`.

    Attributes:
        pool: where blocks come from.
        stage_outputs: the rows beside the blocks, of which those that are wanted must be there;
            None where blocks are all there is.
        block_size: how much of an input's length a block holds: tokens, or bytes.
        group_id: the group these blocks are handed out for.
        max_blocks: most blocks, held and cached ones together, as far as :meth:`has_room` is asked
            before more are taken; None: what the pool gives.
    """

    pool: BlockPool
    stage_outputs: StageOutputCache | None
    block_size: int
    group_id: int = 0
    max_blocks: int | None = None

    def num_blocks_for(self, length: int) -> int:
        """Blocks that an input takes. ``ValueError`` if it is empty."""
        if length < 1:
            raise ValueError(f"an input has a length of at least 1, got {length}")
        return -(-length // self.block_size)

    def has_room(self, num_blocks: int, beside: Mapping[int, int]) -> bool:
        """Whether so many more blocks may be held, together with so many of other groups.

        Others of this group are evicted for them as ``max_blocks`` demands.
        """
        if not self.pool.can_allocate({**beside, self.group_id: num_blocks}):
            return False
        if self.max_blocks is None:
            return True
        room = self.max_blocks - self.pool.num_held(self.group_id) - num_blocks
        for _ in range(self.pool.num_cached(self.group_id) - room if room >= 0 else 0):
            self.pool.evict(self.group_id)
        return room >= 0

    def find(self, input_hash: BlockHash, length: int) -> list[KVCacheBlock] | None:
        """The blocks of an input of which every wanted row is there, or None.

        Takes a reference to each block: give them back with :meth:`release`.

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
        """Take one more reference to blocks that are held or cached."""
        for block in blocks:
            self.pool.touch(block)

    def allocate(self, length: int, keep: Mapping[int, int] | None = None) -> list[KVCacheBlock]:
        """New blocks for an input, one reference each.

        Args:
            keep: see :meth:`BlockPool.allocate`.

        Raises:
            ValueError: empty, or fewer blocks are free than it takes; nothing has changed.
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
        """Let an input be found, after its rows are written.

        Raises:
            ValueError: if the blocks are not as many as the input takes.
        """
        keys = list(whole_input_block_hashes(input_hash, length, self.block_size))
        if len(blocks) != len(keys):
            raise ValueError(
                f"an input of length {length} takes {len(keys)} blocks, got {len(blocks)}"
            )
        for block, key in zip(blocks, keys, strict=True):
            self.pool.publish(block, key)

    def release(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Give back one reference per block; what was published stays until it is evicted."""
        self.pool.release(reversed(blocks))
