"""Outputs of bidirectional encoders, found by the whole input.

Every row of such an encoder depends on all tokens, so a prefix says nothing: a hit is the whole
input or none of it. Its blocks live in the pool and store of prefix blocks; only keys differ::

    input of 10 tokens, block_size 4     [ b0: 4 rows ] [ b1: 4 rows ] [ b2: 2 rows, rest unused ]
                                     key: (whole, 0, 10) (whole, 1, 10) (whole, 2, 10)

The last block may be partly filled: it is shared only by inputs that are equal in whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from prefix_cache.blocks.block import KVCacheBlock
from prefix_cache.blocks.block_hash import BlockHash, whole_input_block_hashes
from prefix_cache.blocks.block_pool import BlockPool
from prefix_cache.stores.stage_output_cache import StageOutputCache

__all__ = ["WholeInputCache"]


class WholeInputCache:
    """Blocks of whole inputs.

    The life of an input: :meth:`find`; on a miss :meth:`allocate`, run the encoder, write the
    rows to the stage outputs, :meth:`publish`; in either case gather, then :meth:`release`.

    Args:
        pool: where blocks come from.
        stage_outputs: the rows beside the pool's blocks.
        block_size: tokens per block.
        group_id: the group these blocks are handed out for.
    """

    def __init__(
        self, pool: BlockPool, stage_outputs: StageOutputCache, block_size: int, group_id: int = 0
    ) -> None:
        self.pool = pool
        self.stage_outputs = stage_outputs
        self.block_size = block_size
        self.group_id = group_id

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that an input of ``num_tokens`` takes. ``ValueError`` if it is empty."""
        if num_tokens < 1:
            raise ValueError(f"an input has at least one token, got {num_tokens}")
        return -(-num_tokens // self.block_size)

    def find(self, input_hash: BlockHash, num_tokens: int) -> list[KVCacheBlock] | None:
        """The blocks of an input of which every wanted row is there, or None.

        Takes a reference to each block: give them back with :meth:`release`.

        Args:
            input_hash: see :func:`prefix_cache.blocks.block_hash.whole_input_hash`.
            num_tokens: of the input.
        """
        blocks: list[KVCacheBlock] = []
        for key in whole_input_block_hashes(input_hash, num_tokens, self.block_size):
            block = self.pool.lookup(self.group_id, key)
            if block is None:
                return None
            blocks.append(block)
        block_ids = [block.block_id for block in blocks]
        if self.stage_outputs.num_valid_rows(block_ids) < num_tokens:
            return None
        for block in blocks:
            self.pool.touch(block)
        return blocks

    def allocate(self, num_tokens: int) -> list[KVCacheBlock]:
        """New blocks for an input, one reference each.

        Raises:
            ValueError: empty, or fewer blocks are free than it takes; nothing has changed.
        """
        num_blocks = self.num_blocks_for(num_tokens)
        free = self.pool.num_free(self.group_id)
        if num_blocks > free:
            raise ValueError(
                f"an input of {num_tokens} tokens needs {num_blocks} blocks of "
                f"{self.block_size}, {free} are free now"
            )
        return self.pool.allocate({self.group_id: num_blocks})[self.group_id]

    def publish(
        self, input_hash: BlockHash, num_tokens: int, blocks: Sequence[KVCacheBlock]
    ) -> None:
        """Let an input be found, after its rows are written.

        Raises:
            ValueError: if the blocks are not as many as the input takes.
        """
        keys = list(whole_input_block_hashes(input_hash, num_tokens, self.block_size))
        if len(blocks) != len(keys):
            raise ValueError(
                f"an input of {num_tokens} tokens takes {len(keys)} blocks, got {len(blocks)}"
            )
        for block, key in zip(blocks, keys, strict=True):
            self.pool.publish(block, key)

    def release(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Give back one reference per block; what was published stays until it is evicted."""
        self.pool.release(reversed(blocks))
