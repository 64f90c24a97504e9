"""Decodes that share leading blocks attend to them together.

Requests with a common system prompt hold the same physical blocks at the start of their tables.
Gathering those once per request is most of a decode's memory traffic, so they are taken apart::

    table of a | 7 8 9 | 3  .  |        shared 7 8 9: gathered once, all queries in one product
    table of b | 7 8 9 | 12 4  |        the rest: per request, as without sharing
    table of c | 7 8 9 | 5  .  |

Both parts give an output and the logarithm of their softmax's denominator, and merge exactly::

    output = (o1 * exp(l1) + o2 * exp(l2)) / (exp(l1) + exp(l2))

Source: the merge is that of FlashAttention's split over keys (Dao et al., 2022); sharing it over
requests is known as cascade attention (Ye et al., FlashInfer, 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["SharedPrefix", "attend_with_lse", "find_shared_prefix", "merge_attention"]

# Below this the merge costs more than the gathers that it saves.
_MIN_REQUESTS = 4
_MIN_TOKENS = 64


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Decodes that start with the same blocks.

    Attributes:
        members: their request indices, ascending.
        num_blocks: leading blocks that all of them hold. Each member has a token behind them.
    """

    members: tuple[int, ...]
    num_blocks: int


def find_shared_prefix(
    block_table: Tensor, seq_lens: Sequence[int], block_size: int
) -> SharedPrefix | None:
    """The largest set of decodes with a common start that is worth attending to together.

    Args:
        block_table: ``(num_decodes, blocks)`` on the CPU.
        seq_lens: tokens per decode, this step's included.
        block_size: tokens per block.
    """
    if len(seq_lens) < _MIN_REQUESTS:
        return None
    firsts, inverse, counts = block_table[:, 0].unique(return_inverse=True, return_counts=True)
    largest = int(counts.argmax())
    if int(counts[largest]) < _MIN_REQUESTS or int(firsts[largest]) == 0:
        return None
    members = (inverse == largest).nonzero().squeeze(1)
    rows = block_table.index_select(0, members)
    equal = (rows == rows[0]).all(dim=0)
    # The newest token's block is never shared, so that every tail has a key.
    shortest = min(seq_lens[member] for member in members.tolist())
    num_blocks = int(equal.long().cumprod(0)[: (shortest - 1) // block_size].sum())
    if num_blocks * block_size < _MIN_TOKENS:
        return None
    return SharedPrefix(tuple(members.tolist()), num_blocks)


def attend_with_lse(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention and the logarithm of its softmax's denominator, on a CPU.

    Args:
        query: ``(B, heads, Q, head_dim)``.
        keys: ``(B, heads, T, head_dim)``.
        values: as ``keys``.
        scale: factor on the scores.
        mask: added to the scores, broadcast to ``(B, heads, Q, T)``.

    Returns:
        ``(B, heads, Q, head_dim)`` and ``(B, heads, Q)``.
    """
    # The operator behind scaled_dot_product_attention, called by its own name because only
    # there the denominator comes out.
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, attn_mask=mask, scale=scale
    )
    return output, lse


def merge_attention(first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor) -> Tensor:
    """Attention over two disjoint sets of keys together.

    Args:
        first: ``(..., head_dim)``, over the one set.
        first_lse: ``(...)``, its log denominator.
        second: over the other set.
        second_lse: likewise.
    """
    weight = torch.sigmoid(first_lse - second_lse).unsqueeze(-1)
    return torch.lerp(second, first, weight)
