"""Where an encoder's rows go and come from: blocks of the pool, found by the whole input."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.encoder.encoder_request import EncoderRequest
from prefix_cache import (
    BlockPool,
    KVCacheBlock,
    KVCacheStats,
    StageOutputCache,
    WholeInputCache,
    check_pool_integrity,
)

__all__ = ["EncoderOutputStore", "HeldInput"]


@dataclass(frozen=True, slots=True)
class HeldInput:
    """An input that has blocks, for the length of one step."""

    request: EncoderRequest
    blocks: Sequence[KVCacheBlock]

    @property
    def block_ids(self) -> list[int]:
        """The block table."""
        return [block.block_id for block in self.blocks]


class EncoderOutputStore:
    """A pool of blocks with the rows beside them.

    Args:
        num_blocks: the null block included.
        block_size: tokens per block.
        names: outputs to keep.
    """

    def __init__(self, num_blocks: int, block_size: int, names: Collection[str]) -> None:
        self._num_blocks, self._block_size, self._names = num_blocks, block_size, names
        self._hit_tokens = 0
        self._queried_tokens = 0
        self.clear()

    def clear(self) -> None:
        """Forget all inputs, held ones too, in whatever state an interrupted call left them."""
        self._pool = BlockPool.uniform(self._num_blocks)
        self._rows = StageOutputCache(
            self._num_blocks, self._block_size, self._pool.generations(0), self._names
        )
        self._inputs = WholeInputCache(self._pool, self._rows, self._block_size)

    def find(self, request: EncoderRequest) -> HeldInput | None:
        """Hold an input whose rows are all there, or None."""
        blocks = self._inputs.find(request.input_hash, request.num_tokens)
        if blocks is None:
            return None
        self._hit_tokens += request.num_tokens
        self._queried_tokens += request.num_tokens
        return HeldInput(request, blocks)

    def hold(self, request: EncoderRequest) -> HeldInput | None:
        """Hold new blocks for an input, or None when too few are free in this step."""
        if self._inputs.num_blocks_for(request.num_tokens) > self._pool.num_free():
            return None
        return HeldInput(request, self._inputs.allocate(request.num_tokens))

    def write(self, held: Sequence[HeldInput], rows: dict[str, Tensor]) -> None:
        """Write a batch: ``name -> (tokens of all inputs, ...)``, one scatter per name."""
        slots = [
            self._rows.slots(torch.tensor(item.block_ids))[: item.request.num_tokens]
            for item in held
        ]
        self._rows.write(torch.cat(slots), rows)

    def gather(self, item: HeldInput) -> dict[str, Tensor]:
        """``name -> (num_tokens, ...)``, in memory of its own.

        Raises:
            RuntimeError: a name to keep was never written for this input.
        """
        rows = self._rows.gather(item.block_ids, item.request.num_tokens)
        missing = self._rows.wanted - rows.keys()
        if missing:
            raise RuntimeError(f"the model gave no rows of {', '.join(sorted(missing))}")
        return rows

    def publish(self, item: HeldInput) -> None:
        """Let an input be found, after its rows are written."""
        self._queried_tokens += item.request.num_tokens
        self._inputs.publish(item.request.input_hash, item.request.num_tokens, item.blocks)

    def release(self, item: HeldInput) -> None:
        """Give the blocks back; what was published can be found until it is evicted."""
        self._inputs.release(item.blocks)

    def reset(self) -> None:
        """Forget all inputs."""
        self._pool.reset()

    def stats(self) -> KVCacheStats:
        """The pool now, and how many tokens were found in it."""
        found = KVCacheStats.of_pool(self._pool, self._hit_tokens, self._queried_tokens)
        return replace(found, output_bytes=self._rows.nbytes)

    def check_integrity(self) -> None:
        """Check the pool between two steps, when nothing is held.

        Raises:
            IntegrityError: with the equation that failed.
        """
        check_pool_integrity(self._pool, tables=())
