"""Lets nothing of a key that a query does not see reach its output, not even NaN.

A weight of 0 does not do that: 0 * NaN is NaN, and so is NaN plus the minus infinity of a mask::

    key            0  1  2  3 (NaN)              key            0  1  2  3
    query 2        x  x  x  .         is not     query 2        x  x  x  .     is to equal this
    query 3        x  x  x  x                    query 3        x  x  x  x

Numbers that are not finite are rare, and leave their mark: an output that is finite took in
nothing of the kind. So outputs are looked at, at the cost of a sum, and only one that is not finite
is computed once more, with such keys left out, for the queries that do not see them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.resources.finite_numbers import are_finite

__all__ = ["attend_to_seen"]


def attend_to_seen(
    attend: Callable[[Tensor, Tensor], Tensor],
    keys: Tensor,
    values: Tensor,
    sees: Callable[[], Tensor],
) -> Tensor:
    """What ``attend(keys, values)`` gives, with nothing in it of what a query does not see.

    On CUDA, where looking means waiting for the device in every layer, outputs are taken as they
    are. What is not finite can reach there only earlier tokens of the sequence that it belongs to:
    the engine clears the rest of new pages, kernels read no others, and a request of which some
    row is not finite fails, and nothing of that step is published.

    Args:
        attend: from keys and values to the output, ``(..., queries, num_heads, head_dim)``.
        keys: ``(..., keys, num_kv_heads, head_dim)``.
        values: as ``keys``.
        sees: makes ``(..., queries, keys)`` booleans, of who sees whom.
    """
    output = attend(keys, values)
    if output.is_cuda or are_finite([output]):
        return output
    spoilt = ~(keys.isfinite() & values.isfinite()).flatten(-2).all(-1)
    hidden = spoilt[..., None, None]
    others = attend(keys.masked_fill(hidden, 0.0), values.masked_fill(hidden, 0.0))
    is_touched = (sees() & spoilt[..., None, :]).any(-1)
    return torch.where(is_touched[..., None, None], output, others)
