"""Attention among neighbouring blocks of a sequence, without the scores of all the others."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

__all__ = ["NEIGHBOURS", "NEIGHBOUR_ATTENTION", "neighbour_attention"]

NEIGHBOUR_ATTENTION = "omni_neighbour_blocks"
"""The name by which configs of transformers choose :func:`neighbour_attention`."""

NEIGHBOURS = (-1, 0, 1)
"""Blocks that a block may see, counted from itself."""


def neighbour_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """What masked attention gives, at a cost that grows with the length, not with its square.

    The sequence is cut into blocks, the last of which may be short. Each is a row of a batch::

        query   [ block 0 ]   [ block 1 ]   [ block 2 ]
        keys    [ - | 0 | 1 ] [ 0 | 1 | 2 ] [ 1 | 2 | - ]     where both neighbours are seen

    Args:
        module: has ``config.block_size``.
        query: ``(B, heads, n, head_dim)``.
        key: likewise.
        value: likewise.
        attention_mask: ``(3,)`` bool on the CPU, whether a block sees each of ``NEIGHBOURS``.

    Returns:
        ``(B, n, heads, head_dim)``, and None for the weights, as transformers expects.
    """
    batch, heads, length, head_dim = query.shape
    block_size: int = module.config.block_size  # type: ignore[union-attr, assignment]
    num_blocks = -(-length // block_size)
    seen = [place for place, sees in enumerate(attention_mask.tolist()) if sees]
    fill = num_blocks * block_size - length

    def rows(blocks: Tensor) -> Tensor:
        """``(B, heads, num_blocks, m, head_dim)`` to a batch of blocks."""
        return blocks.transpose(1, 2).flatten(0, 1)

    def neighbours(tensor: Tensor) -> Tensor:
        """``(B, heads, n, head_dim)`` to what each block sees, one neighbour after the other."""
        if seen == [1]:
            return rows(F.pad(tensor, (0, 0, 0, fill)).unflatten(2, (num_blocks, block_size)))
        padded = F.pad(tensor, (0, 0, block_size, fill + block_size))
        blocks = padded.unflatten(2, (num_blocks + 2, block_size))
        return rows(torch.cat([blocks[:, :, p : p + num_blocks] for p in seen], dim=3))

    queries = rows(F.pad(query, (0, 0, 0, fill)).unflatten(2, (num_blocks, block_size)))
    mask = None
    if fill or seen != [1]:
        exists = neighbours(query.new_ones(1, 1, length, 1)).bool()
        mask = exists.transpose(2, 3).repeat(batch, 1, 1, 1)
    attended = F.scaled_dot_product_attention(
        queries, neighbours(key), neighbours(value), attn_mask=mask
    )
    blocks = attended.unflatten(0, (batch, num_blocks)).transpose(2, 3)
    return blocks.reshape(batch, -1, heads, head_dim)[:, :length], None


AttentionInterface.register(NEIGHBOUR_ATTENTION, neighbour_attention)
