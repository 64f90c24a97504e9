"""Mamba-1's recurrence over the packed tokens of a step.

Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layers.packed_layout import TimeOrder

__all__ = ["ScanInputs", "selective_scan", "selective_step"]


@dataclass(frozen=True, slots=True)
class ScanInputs:
    """What the recurrence takes in for each of ``n`` tokens; float32.

    Attributes:
        x: ``(n, channels)``.
        dt: ``(n, channels)``, positive step sizes.
        b: ``(n, state_size)``.
        c: ``(n, state_size)``.
    """

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor


def selective_step(inputs: ScanInputs, a: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each request; see :func:`selective_scan` for what is computed.

    Args:
        inputs: token i is request i's.
        a: ``(channels, state_size)`` float32, negative.
        states: ``(num_reqs, channels, state_size)`` float32 before the step, changed in place.

    Returns:
        ``y`` ``(num_reqs, channels)``, and the states after the tokens.
    """
    states.mul_(torch.exp(inputs.dt[:, :, None] * a))
    states.addcmul_((inputs.x * inputs.dt)[:, :, None], inputs.b[:, None, :])
    return torch.bmm(states, inputs.c[:, :, None]).squeeze(-1), states


def selective_scan(
    inputs: ScanInputs, a: Tensor, states: Tensor, order: TimeOrder
) -> tuple[Tensor, Tensor]:
    """Run, for every token of every request in its order::

        h = exp(dt * A) * h + (dt * x) B^T        (channels, state_size)
        y = h C                                   (channels,)

    The requests' first tokens are one batch, their second tokens the next, and so on: a step of
    decodes is a single batch. The decays of a channel differ from state to state, which leaves no
    matrix form over time as :mod:`engine.layers.ssd_scan` has it.

    Args:
        inputs: packed tokens.
        a: ``(channels, state_size)`` float32, negative.
        states: ``(num_reqs, channels, state_size)`` float32 before the step.
        order: of all tokens.

    Returns:
        ``y`` ``(num_tokens, channels)``, and the states after the step, in the order of requests.
    """
    packed = (inputs.x * inputs.dt, inputs.dt, inputs.b, inputs.c)
    x_dt, dt, b, c = (rows.index_select(0, order.items) for rows in packed)
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
