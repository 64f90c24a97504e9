"""Attention among neighbouring blocks of a sequence, without the scores of all the others."""

from __future__ import annotations

from functools import lru_cache
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

_ITSELF = (NEIGHBOURS.index(0),)
# To lay out a block's keys takes a CPU about as long as to score them once more.
_COST_OF_CUTTING = 2
# All layers and passes over one length share their masks; streams have few lengths.
_KEPT_MASKS = 32


def neighbour_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """What masked attention gives, at a cost that grows with the length, not with its square.

    The sequence is cut into blocks, the last of which may be short. Each is a row of a batch::

        query   [ block 0 ]   [ block 1 ]   [ block 2 ]
        keys    [ - | 0 | 1 ] [ 0 | 1 | 2 ] [ 1 | 2 | - ]     where both neighbours are seen

    Where there are few blocks, all their scores under a mask cost less.

    Args:
        module: has ``config.block_size``.
        query: ``(B, heads, n, head_dim)``.
        key: likewise.
        value: likewise.
        attention_mask: ``(3,)`` bool on the CPU, whether a block sees each of ``NEIGHBOURS``;
            itself it always does.

    Returns:
        ``(B, n, heads, head_dim)``, and None for the weights, as transformers expects.
    """
    block_size: int = module.config.block_size  # type: ignore[union-attr, assignment]
    seen = tuple(place for place, sees in enumerate(attention_mask.tolist()) if sees)
    length = query.shape[2]
    num_blocks = -(-length // block_size)
    if num_blocks > _COST_OF_CUTTING * len(seen):
        return _by_blocks((query, key, value), block_size, seen), None
    mask = None if num_blocks == 1 else _seen_pairs(length, block_size, seen, query.device)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2), None


def _by_blocks(
    tensors: tuple[Tensor, Tensor, Tensor], block_size: int, seen: tuple[int, ...]
) -> Tensor:
    """Query, key and value to ``(B, n, heads, head_dim)``, without scores that are not seen."""
    query, key, value = (each.transpose(1, 2) for each in tensors)
    batch, length = query.shape[:2]
    mask = None
    if length % block_size or seen != _ITSELF:
        mask = _existing_keys(batch, length, block_size, seen, query.device)
    blocks = F.scaled_dot_product_attention(
        _cut(query, block_size, _ITSELF).transpose(1, 2),
        _cut(key, block_size, seen).transpose(1, 2),
        _cut(value, block_size, seen).transpose(1, 2),
        attn_mask=mask,
    )
    attended = blocks.transpose(1, 2).reshape(batch, -1, *query.shape[2:])
    return attended[:, :length]


def _cut(rows: Tensor, block_size: int, seen: tuple[int, ...]) -> Tensor:
    """``(B, n, ...)`` to ``(B * blocks, len(seen) * block_size, ...)``: what each block sees.

    Zeros stand for what is before the first block, and behind the last row.
    """
    fill = -rows.shape[1] % block_size
    around = 0 if seen == _ITSELF else block_size
    if around or fill:
        rows = F.pad(rows, (0, 0) * (rows.ndim - 2) + (around, fill + around))
    blocks: Tensor = rows.unflatten(1, (-1, block_size))
    if around:
        num_blocks = blocks.shape[1] - 2
        blocks = torch.cat([blocks[:, place : place + num_blocks] for place in seen], dim=2)
    return blocks.flatten(0, 1)


@lru_cache(_KEPT_MASKS)
def _seen_pairs(
    length: int, block_size: int, seen: tuple[int, ...], device: torch.device
) -> Tensor:
    """Which keys each query sees, ``(length, length)``."""
    blocks = torch.arange(length, device=device) // block_size
    distances = torch.tensor([NEIGHBOURS[place] for place in seen], device=device)
    return torch.isin(blocks - blocks[:, None], distances)


@lru_cache(_KEPT_MASKS)
def _existing_keys(
    batch: int, length: int, block_size: int, seen: tuple[int, ...], device: torch.device
) -> Tensor:
    """Which keys of a cut are of the sequence, ``(batch * blocks, 1, 1, keys)``."""
    rows = torch.ones(batch, length, dtype=torch.bool, device=device)
    return _cut(rows, block_size, seen)[:, None, None]


AttentionInterface.register(NEIGHBOUR_ATTENTION, neighbour_attention)
