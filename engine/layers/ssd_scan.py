"""Mamba-2's recurrence: one token per request, or whole prompts in matrix form.

Source: Dao and Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through
Structured State Space Duality", 2024 (section 6). One decay per head and token allows it::

    h[t] = exp(a[t]) h[t-1] + x[t] B[t]^T          (head_dim, state_size) per head
    y[t] = h[t] C[t]

Inside of a chunk, with ``A[t] = a[0] + ... + a[t]``::

    y[t] =   sum over s <= t of (C[t] . B[s]) exp(A[t] - A[s]) x[s]      like attention
           + exp(A[t]) h_before C[t]                                     what the state brings

Heads share B and C in groups, as grouped-query attention shares keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layers.packed_layout import Chunks
from engine.resources.finite_numbers import are_finite

__all__ = ["SsdInputs", "ssd_scan", "ssd_step"]


@dataclass(frozen=True, slots=True)
class SsdInputs:
    """What the recurrence takes in for each of ``n`` tokens; float32.

    Attributes:
        x: ``(n, heads, head_dim)``, the input times its step size.
        a: ``(n, heads)``, the logarithm of the decay, at most 0.
        b: ``(n, groups, state_size)``; groups divide heads.
        c: ``(n, groups, state_size)``.
    """

    x: Tensor
    a: Tensor
    b: Tensor
    c: Tensor

    def __getitem__(self, tokens: slice) -> SsdInputs:
        """A range of the tokens."""
        return SsdInputs(self.x[tokens], self.a[tokens], self.b[tokens], self.c[tokens])


def ssd_step(inputs: SsdInputs, states: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each request.

    Args:
        inputs: token i is request i's.
        states: ``(num_reqs, heads, head_dim, state_size)`` float32.

    Returns:
        ``y`` ``(num_reqs, heads, head_dim)``, and the states after the tokens.
    """
    heads_per_group = inputs.x.shape[1] // inputs.b.shape[1]
    b = inputs.b.repeat_interleave(heads_per_group, dim=1)
    c = inputs.c.repeat_interleave(heads_per_group, dim=1)
    states = states * torch.exp(inputs.a)[:, :, None, None]
    states.addcmul_(inputs.x[..., None], b[:, :, None, :])
    return (states @ c[..., None]).squeeze(-1), states


def ssd_scan(inputs: SsdInputs, states: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """All tokens of several requests: matrix form inside of chunks, a recurrence over them.

    Args:
        inputs: packed tokens.
        states: ``(num_reqs, heads, head_dim, state_size)`` float32 before the tokens.
        chunks: how the tokens are cut.

    Returns:
        ``y`` ``(num_tokens, heads, head_dim)``, and the states after each request's last token.
    """
    num_groups = inputs.b.shape[1]
    # (chunks, groups, heads per group, size, ...); a pad has x = 0 and a = 0 and changes nothing.
    x = chunks.pad(inputs.x).transpose(1, 2).unflatten(1, (num_groups, -1))
    a = chunks.pad(inputs.a).transpose(1, 2).unflatten(1, (num_groups, -1))
    b = chunks.pad(inputs.b).transpose(1, 2)
    c = chunks.pad(inputs.c).transpose(1, 2)
    # Differences of large sums: in float32 a strong decay would drown the weak ones after it.
    sums = a.double().cumsum(-1)

    to_each = (sums[..., :, None] - sums[..., None, :]).float()
    size = chunks.size
    future = torch.ones(size, size, dtype=torch.bool, device=x.device).triu_(1)
    weights = to_each.exp_().mul_((c @ b.transpose(-1, -2)).unsqueeze(2))
    # Last of all, so that nothing of a later token, be it NaN, is left in what an earlier one sees.
    y = _weighted(weights.masked_fill_(future, 0.0), x)

    to_end = torch.exp((sums[..., -1:] - sums).float())
    brought = (x * to_end[..., None]).transpose(-1, -2) @ b.unsqueeze(2)
    decays = torch.exp(sums[..., -1].float())
    before, after = _states_at_chunks(brought.flatten(1, 2), decays.flatten(1, 2), states, chunks)

    from_start = torch.exp(sums.float())[..., None]
    y += from_start * (c.unsqueeze(2) @ before.unflatten(1, (num_groups, -1)).transpose(-1, -2))
    return chunks.unpad(y.flatten(1, 2).transpose(1, 2)), after


def _weighted(weights: Tensor, x: Tensor) -> Tensor:
    """``weights @ x``, and no later token that is not finite reaches an earlier one as 0 * NaN.

    On CUDA, where looking means waiting, it may: see :func:`attend_to_seen` for what follows.

    Args:
        weights: ``(..., size, size)``, 0 where a token comes after the one that sees.
        x: ``(..., size, head_dim)``.
    """
    y = weights @ x
    if y.is_cuda or are_finite([y]):
        return y
    spoilt = ~x.isfinite().all(-1)
    earlier = weights @ x.masked_fill(spoilt[..., None], 0.0)
    is_reached = spoilt.cumsum(-1) > 0
    return torch.where(is_reached[..., None], y, earlier)


def _states_at_chunks(
    brought: Tensor, decays: Tensor, states: Tensor, chunks: Chunks
) -> tuple[Tensor, Tensor]:
    """Carry states over chunks.

    Args:
        brought: ``(count, heads, head_dim, state_size)``, what a chunk adds to the state.
        decays: ``(count, heads)``, what is left of the state that it found.
        states: ``(num_reqs, heads, head_dim, state_size)`` before the first chunks.
        chunks: their order.

    Returns:
        The states before each chunk, shaped as ``brought``, and after the requests' last ones.
    """
    order = chunks.order
    h = states.index_select(0, order.sequences)
    before = torch.empty_like(brought)
    for now in order.batches():
        items = order.items[now]
        going = h[: len(items)]
        before.index_copy_(0, items, going)
        going.mul_(decays[items, :, None, None]).add_(brought[items])
    return before, torch.empty_like(h).index_copy_(0, order.sequences, h)
