"""From logits to a drawn token: temperature, the filters, and the draw itself.

Everything is float64 and row by row, so that a row's token does not depend on what else is in
the batch: the last bits in which kernels may differ between batch sizes are then far too small
to move a draw. The filters work with thresholds, not with ranks: equal logits stay or go
together, and no result depends on the order in which a sort leaves ties.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.interface.sampling_params import SamplingParams

__all__ = ["draw", "keep_min_p", "keep_top_k", "keep_top_p", "shape_distribution"]

# Top-p nearly always keeps fewer tokens than this; a full sort costs some ten times more.
_FIRST_LOOK = 1024


def shape_distribution(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Apply temperature, min-p, top-k and top-p, in this order.

    Args:
        logits: ``(n, vocab)`` floating point; each row's largest is finite. Left as it is.
        params: one per row, none of them greedy.

    Returns:
        ``(n, vocab)`` float64 logits; what is not to be drawn is minus infinity.
    """

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    shaped = logits.double()
    # The largest becomes 0 first: a tiny temperature then overflows to minus infinity only.
    shaped = shaped - shaped.amax(dim=-1, keepdim=True)
    shaped /= column([p.temperature for p in params])
    if any(p.min_p > 0.0 for p in params):
        shaped = keep_min_p(shaped, column([p.min_p for p in params]))
    if any(p.top_k > 0 for p in params):
        shaped = keep_top_k(shaped, [p.top_k for p in params])
    if any(p.top_p < 1.0 for p in params):
        shaped = keep_top_p(shaped, column([p.top_p for p in params]))
    return shaped


def keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Keep tokens at least ``min_p`` times as likely as the likeliest.

    Args:
        logits: ``(n, vocab)``, the largest of each row being 0.
        min_p: ``(n, 1)`` in ``[0, 1]``; 0 keeps all.
    """
    return logits.masked_fill(logits < min_p.log(), -torch.inf)


def keep_top_k(logits: Tensor, top_k: Sequence[int]) -> Tensor:
    """Keep each row's ``top_k`` largest, and what equals the smallest of these.

    Args:
        logits: ``(n, vocab)``.
        top_k: one per row; 0, or more than there are, keeps all.
    """
    vocab_size = logits.shape[1]
    kept = torch.tensor([min(k, vocab_size) for k in top_k], device=logits.device)[:, None]
    largest = logits.topk(min(max(top_k), vocab_size), dim=-1).values
    threshold = largest.gather(1, (kept - 1).clamp(min=0))
    return logits.masked_fill((logits < threshold) & (kept > 0), -torch.inf)


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep the likeliest tokens until their probability reaches ``top_p`` (nucleus sampling).

    The token that crosses the border is kept, and so is what equals it.

    Args:
        logits: ``(n, vocab)`` float64, the largest of each row being 0.
        top_p: ``(n, 1)`` in ``(0, 1]``; 1 keeps all.
    """
    vocab_size = logits.shape[1]
    wanted = top_p * logits.exp().cumsum(dim=-1)[:, -1:]
    limited = top_p < 1.0
    size = min(_FIRST_LOOK, vocab_size)
    while True:
        largest = logits.topk(size, dim=-1).values
        reached = largest.exp().cumsum(dim=-1)
        if size == vocab_size or bool(((reached[:, -1:] >= wanted) | ~limited).all()):
            break
        size = vocab_size
    last_kept = (reached < wanted).sum(dim=-1, keepdim=True).clamp(max=size - 1)
    threshold = largest.gather(1, last_kept)
    return logits.masked_fill((logits < threshold) & limited, -torch.inf)


def draw(logits: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Draw one token per row by inverting the cumulative distribution, in order of ids.

    Args:
        logits: ``(n, vocab)`` float64, the largest of each row being 0.
        uniforms: one per row, in ``(0, 1]``.

    Returns:
        ``(n,)`` ids. The first whose cumulative weight reaches the row's number; as the number
        is above 0 and at most 1, that token exists and has a weight.
    """
    reached = logits.exp().cumsum(dim=-1)
    share = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None]
    return torch.searchsorted(reached, share * reached[:, -1:]).squeeze(-1)
