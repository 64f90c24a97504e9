"""What is added to a score by how far its key lies behind: T5's relative positions, ALiBi.

A bias is a table of one row per head and one column per distance, the query's own position being
distance 0. It ends where the distance stops to matter: all that are longer take its last column::

    bias[h]       b0 b1 b2 b3

    key           0  1  2  3  4  5  6
    query 5      b3 b3 b3 b2 b1 b0  .
    query 6      b3 b3 b3 b3 b2 b1 b0

So a page of keys needs no page of biases, and a decode reads what a prefill did.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.metadata import AttentionMetadata

__all__ = ["bias_at", "bias_of_tile", "check_bias"]


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
