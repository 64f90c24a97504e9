"""Which positions of its sequence a token sees, for every backend but the reference.

From above it is always causality that ends what a token sees, its own position being the last.
From below it is one position, which windows and chunks move up::

    position        0 1 2 3 4 5 6 7 8
    full            x x x x x x x q        first visible: 0
    window of 3     . . . . . x x q        itself included
    chunks of 4     . . . . x x x q        chunks begin at multiples of 4
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["chunk_bounds", "first_visible"]


def first_visible(positions: Tensor, window: int | None, chunk_size: int | None) -> Tensor:
    """The first position that tokens see.

    Args:
        positions: integers of any shape.
        window: how many positions a token sees at most, itself included; None: all before it.
        chunk_size: a token sees its own chunk of so many positions only; None: no chunks.

    Returns:
        Integers of the same shape and type.
    """
    first = torch.zeros_like(positions)
    if window is not None:
        first = (positions - window + 1).clamp_(min=0)
    if chunk_size is not None:
        first = torch.maximum(first, positions - positions % chunk_size)
    return first


def chunk_bounds(start: int, end: int, chunk_size: int | None) -> list[int]:
    """Cut positions ``start .. end - 1`` where chunks end.

    Returns:
        ``start``, all multiples of ``chunk_size`` in between, ``end``.
    """
    if chunk_size is None:
        return [start, end]
    return [start, *range((start // chunk_size + 1) * chunk_size, end, chunk_size), end]
