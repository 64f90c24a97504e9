"""The Mamba-2 mixer: heads with one decay each, and a gated norm before the projection out.

Source: Dao and Gu, "Transformers are SSMs", 2024 (section 7).

Mamba-2's recurrence: one token per request, or whole prompts in matrix form.

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

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.layer import AttentionStep
from engine.layers.recurrent_mixer import (
    Chunks,
    PackedLayout,
    RecurrentConfig,
    RecurrentMixer,
)
from engine.resources.finite_numbers import are_finite

__all__ = ["Mamba2Config", "Mamba2Mixer", "SsdInputs", "ssd_scan"]


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
    """One token of each request."""
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
    """Carry states over chunks."""
    order = chunks.order
    h = states.index_select(0, order.sequences)
    before = torch.empty_like(brought)
    for now in order.batches():
        items = order.items[now]
        going = h[: len(items)]
        before.index_copy_(0, items, going)
        going.mul_(decays[items, :, None, None]).add_(brought[items])
    return before, torch.empty_like(h).index_copy_(0, order.sequences, h)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config(RecurrentConfig):
    """The sizes and options of a Mamba-2 mixer.

    Attributes:
        num_heads: heads of the recurrence.
        head_dim: channels per head.
        num_groups: B and C are shared by the heads of a group; divides ``num_heads``.
        dt_limit: least and greatest step size.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    dt_limit: tuple[float, float]

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"the number of Mamba heads must be a multiple of its groups, "
                f"got {self.num_heads} and {self.num_groups}"
            )

    @property
    def inner_size(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def group_state_size(self) -> int:
        """Width of B, and of C, over all groups."""
        return self.num_groups * self.state_size


class GatedNorm(nn.Module):
    """RMS norm, per group of channels, of ``y * silu(gate)``; computed in float32."""

    def __init__(self, config: Mamba2Config, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        weight = torch.empty(config.inner_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.num_groups = config.num_groups
        self.eps = config.norm_eps

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """Both ``(num_tokens, inner_size)``, ``y`` float32; the result is of the gate's type."""
        groups = (y * F.silu(gate.float())).unflatten(-1, (self.num_groups, -1))
        normed = F.rms_norm(groups, groups.shape[-1:], None, self.eps).flatten(-2)
        return normed.to(gate.dtype) * self.weight


class Mamba2Mixer(RecurrentMixer):
    """Mixes a request's tokens through a state of fixed size::

        x ─► in ─┬─► conv ─► act ─► x | B | C ─► scan ─► + D x ─► norm(y * silu(gate)) ─► out
                 ├─► dt ─► softplus ───────────────┘                            │
                 └─► gate ──────────────────────────────────────────────────────┘

    Its arguments are those of :class:`RecurrentMixer`, but for widths and shapes.
    """

    def __init__(
        self,
        layer_name: str,
        config: Mamba2Config,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        inner, group_size = config.inner_size, config.group_state_size
        conv_splits = (inner, group_size, group_size)
        in_splits = (inner, sum(conv_splits), config.num_heads)
        super().__init__(
            layer_name,
            config,
            block_size,
            in_width=sum(in_splits),
            conv_width=sum(conv_splits),
            state_shape=(config.num_heads, config.head_dim, config.state_size),
            dtype=dtype,
            device=device,
        )
        self.config = config
        self.conv_splits, self.in_splits = conv_splits, in_splits
        per_head = torch.empty(3, config.num_heads, dtype=torch.float32, device=device)
        self.a, self.d, self.dt_bias = (nn.Parameter(v, requires_grad=False) for v in per_head)
        self.norm = GatedNorm(config, dtype, device)

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names under ``prefix``, each with the tensor that receives it."""
        yield from super().targets(prefix)
        yield f"{prefix}norm.weight", self.norm.weight.data
        yield f"{prefix}dt_bias", self.dt_bias.data

    def forward(self, x: Tensor, step: AttentionStep, layout: PackedLayout) -> Tensor:
        """Mix ``(num_tokens, hidden_size)`` and move every request's state on."""
        conv_state, ssm_state = self.state.read(step)
        gate, convolved, dt = self.in_proj(x).split(self.in_splits, dim=-1)
        convolved, conv_state = self.conv(convolved, conv_state, layout)
        u, b, c = self.activation(convolved).float().split(self.conv_splits, dim=-1)
        u = u.unflatten(-1, (self.config.num_heads, -1))
        # Decodes too, unlimited in transformers: a token must not depend on being in a prompt.
        dt = F.softplus(dt.float() + self.dt_bias).clamp(*self.config.dt_limit)
        b = b.unflatten(-1, (self.config.num_groups, -1))
        c = c.unflatten(-1, (self.config.num_groups, -1))
        inputs = SsdInputs(x=u * dt[..., None], a=dt * self.a, b=b, c=c)
        y, ssm_state = _recur(inputs, ssm_state, layout)
        self.state.write(step, conv_state, ssm_state)
        y = y.addcmul_(u, self.d[:, None]).flatten(-2)
        mixed: Tensor = self.out_proj(self.norm(y, gate))
        return mixed


def _recur(inputs: SsdInputs, states: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
    """Decodes as one batch, then the longer requests; see :func:`ssd_scan` for the shapes."""
    num_decodes = layout.num_decodes
    if num_decodes == layout.num_reqs:
        return ssd_step(inputs, states)
    if num_decodes == 0:
        return ssd_scan(inputs, states, layout.prefill_chunks)
    decoded = ssd_step(inputs[:num_decodes], states[:num_decodes])
    prefilled = ssd_scan(inputs[num_decodes:], states[num_decodes:], layout.prefill_chunks)
    y, after = (torch.cat(parts) for parts in zip(decoded, prefilled, strict=True))
    return y, after
