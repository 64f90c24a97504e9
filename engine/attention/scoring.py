"""How a layer's products become scores: scaled, capped, and with a bias by distance.

A soft cap bounds scores by ``softcap * tanh(score / softcap)`` before the mask and the softmax,
which torch's fused attention does not know. Relative positions in buckets, and ALiBi, add a bias by
how far a key lies behind. It is a table of one row per head and one column per distance, the
query's own position being distance 0, and ends where the distance stops to matter: longer ones
take its last column::

    bias[h]       b0 b1 b2 b3

    key           0  1  2  3  4  5  6
    query 5      b3 b3 b3 b2 b1 b0  .
    query 6      b3 b3 b3 b3 b2 b1 b0

So a page of keys needs no page of biases, and a decode reads what a prefill did.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.metadata import AttentionMetadata

__all__ = ["Scoring", "bias_at", "bias_of_tile", "check_bias", "soft_capped_attention"]


@dataclass(frozen=True, slots=True)
class Scoring:
    """What a layer does to the products of its queries and keys before the softmax.

    Attributes:
        scale: factor on the products.
        softcap: scores become ``softcap * tanh(score / softcap)``; None leaves them.
        bias: ``(num_heads, distances)`` float32, added to scores last, by how far behind its query
            a key lies; causal attention only; see the module's picture.
    """

    scale: float
    softcap: float | None = None
    bias: Tensor | None = None

    @property
    def only_scales(self) -> bool:
        """Whether there is neither a soft cap nor a bias."""
        return self.softcap is None and self.bias is None


def check_bias(bias: Tensor, num_heads: int, metadata: AttentionMetadata) -> None:
    """Raise ``ValueError`` unless it is a table of these heads for causal attention."""
    fits = bias.ndim == 2 and bias.shape[0] == num_heads and bias.shape[1] > 0
    if not fits or bias.dtype != torch.float32:
        raise ValueError(
            f"expected a float32 bias ({num_heads}, distances), got {bias.dtype} "
            f"{tuple(bias.shape)}"
        )
    if not metadata.causal:
        raise ValueError("a bias by distance needs causal attention: others have no distances")


def bias_at(bias: Tensor, distances: Tensor) -> Tensor:
    """The bias of every head at integer distances of any shape, ``(num_heads, *shape)``.

    Keys behind their query, whose distance is negative, are hidden anyway and get any number.
    """
    return bias[:, distances.clamp(0, bias.shape[1] - 1)]


def bias_of_tile(bias: Tensor, num_queries: int, num_keys: int) -> Tensor:
    """Of neighbouring queries, the last of which has the position of the last key.

    One row holds all distances of the tile, and each query's biases are a stretch of it::

        distance      6 5 4 3 2 1 0 -1      7 keys, 2 queries
        last query  [ 6 5 4 3 2 1 0 ]
        first         [ 5 4 3 2 1 0 -1 ]

    Returns:
        ``(num_heads, num_queries, num_keys)``.
    """
    distances = torch.arange(num_keys - 1, -num_queries, -1, device=bias.device)
    return bias_at(bias, distances).unfold(1, num_keys, 1).flip(1)


def soft_capped_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float
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
