"""Attention with soft-capped scores, which torch's fused attention does not know.

Gemma 2 bounds scores by ``softcap * tanh(score / softcap)`` before the mask and the softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["soft_capped_attention"]


def soft_capped_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float,
) -> Tensor:
    """Attend in float32 at least; all scores exist at once, so callers cut queries into tiles.

    Args:
        query: ``(batch, queries, num_heads, head_dim)``.
        keys: ``(batch, keys, num_kv_heads, head_dim)``; grouped heads are not repeated.
        values: as ``keys``.
        mask: added to the capped scores; broadcast to ``(batch, num_kv_heads, num_heads per
            num_kv_heads, queries, keys)``. None: every query sees every key.
        scale: factor on the scores before they are capped.
        softcap: what capped scores stay below.

    Returns:
        As ``query``.
    """
    exact = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(exact).unflatten(2, (keys.shape[2], -1))
    scores = torch.einsum("bqhgd,bkhd->bhgqk", grouped, keys.to(exact))
    scores.mul_(scale / softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores.add_(mask)
    attended = torch.einsum("bhgqk,bkhd->bqhgd", scores.softmax(-1), values.to(exact))
    return attended.flatten(2, 3).to(query.dtype)
