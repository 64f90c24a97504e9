"""The xformers biases of one step, made from lengths and tables alone.

Pure functions over the metadata, so that a machine without a GPU can check them: every bias
materialises to a dense mask on a CPU. xformers is imported when a mask is first made, because
the import takes seconds and warns on machines where it cannot run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from xformers.ops.fmha.attn_bias import (
        BlockDiagonalCausalFromBottomRightMask,
        PagedBlockDiagonalPaddedKeysMask,
    )

__all__ = ["decode_bias", "prefill_bias", "sequence_slots"]


def prefill_bias(
    query_lens: list[int], seq_lens: list[int], device: torch.device
) -> BlockDiagonalCausalFromBottomRightMask:
    """Each request sees its own keys, causally, its queries being its last tokens::

            keys of r0   keys of r1
    r0 q0 | x x x .    | . . . . . |     cached: 2 of 4 tokens
    r0 q1 | x x x x    | . . . . . |
    r1 q0 | . . . .    | x x x x x |     cached: 4 of 5 tokens
    """
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalFromBottomRightMask

    return BlockDiagonalCausalFromBottomRightMask.from_seqlens(query_lens, seq_lens, device=device)


def decode_bias(
    seq_lens: list[int], block_table: Tensor, chunks_per_page: int, block_size: int
) -> PagedBlockDiagonalPaddedKeysMask:
    """One query per request over paged keys.

    A page of the kernel is one chunk of the buffer (one layer's K or V of one block). The layer
    is in the shifted view, so that one table ``block_id * chunks_per_page`` serves all layers.

    Args:
        seq_lens: keys that each request sees.
        block_table: ``(num_reqs, blocks)`` block ids, on the device.
        chunks_per_page: from :class:`prefix_cache.LayerKVCache`.
        block_size: tokens per block.
    """
    from xformers.ops.fmha.attn_bias import PagedBlockDiagonalPaddedKeysMask

    return PagedBlockDiagonalPaddedKeysMask.from_seqlens(
        q_seqlen=[1] * len(seq_lens),
        kv_seqlen=seq_lens,
        block_tables=(block_table * chunks_per_page).to(torch.int32).contiguous(),
        page_size=block_size,
        device=block_table.device,
    )


def sequence_slots(block_table: Tensor, seq_lens: Tensor, block_size: int) -> Tensor:
    """The slots of all tokens of all requests, request after request, without a loop.

    Args:
        block_table: ``(num_reqs, blocks)``.
        seq_lens: ``(num_reqs,)`` on the same device.
        block_size: tokens per block.

    Returns:
        ``(sum(seq_lens),)`` int64.
    """
    slots = block_table.long()[:, :, None] * block_size
    slots = (slots + torch.arange(block_size, device=slots.device)).flatten(1)
    positions = torch.arange(slots.shape[1], device=slots.device)
    return slots[positions < seq_lens[:, None]]
