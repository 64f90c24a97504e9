"""Mamba-1's recurrence over the packed tokens of a step.

Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.layers.packed_layout import TimeOrder

__all__ = ["selective_scan"]


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, states: Tensor, order: TimeOrder
) -> tuple[Tensor, Tensor]:
    """Run, for every token of every request in its order::

        h = exp(dt * A) * h + (dt * x) B^T        (channels, state_size)
        y = h C                                   (channels,)

    The requests' first tokens are one batch, their second tokens the next, and so on: a step of
    decodes is a single batch. The decays of a channel differ from state to state, which leaves no
    matrix form over time as :mod:`engine.layers.ssd_scan` has it.

    Args:
        x: ``(num_tokens, channels)`` float32.
        dt: ``(num_tokens, channels)`` float32, positive step sizes.
        a: ``(channels, state_size)`` float32, negative.
        b: ``(num_tokens, state_size)`` float32.
        c: ``(num_tokens, state_size)`` float32.
        states: ``(num_reqs, channels, state_size)`` float32 before the step.
        order: of all tokens.

    Returns:
        ``y`` ``(num_tokens, channels)``, and the states after the step, in the order of requests.
    """
    by_time = (t.index_select(0, order.items) for t in (x * dt, dt, b, c))
    x_dt, dt, b, c = by_time
    h = states.index_select(0, order.sequences)
    y = torch.empty_like(x_dt)
    for now in order.batches():
        going = h[: now.stop - now.start]
        going.mul_(torch.exp(dt[now, :, None] * a))
        going.addcmul_(x_dt[now, :, None], b[now, None, :])
        torch.bmm(going, c[now, :, None], out=y[now, :, None])
    return (
        torch.empty_like(y).index_copy_(0, order.items, y),
        torch.empty_like(h).index_copy_(0, order.sequences, h),
    )
