"""The Mamba-2 mixer: heads with one decay each, and a gated norm before the projection out.

Source: Dao and Gu, "Transformers are SSMs", 2024 (section 7).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.state_layer import StateLayer
from engine.attention.step import AttentionStep
from engine.layers.activation import activation_of
from engine.layers.causal_conv import CausalConv
from engine.layers.fused_state_update import fused_state_update
from engine.layers.linear import Linear
from engine.layers.packed_layout import PackedLayout
from engine.layers.ssd_scan import SsdInputs, ssd_scan, ssd_step
from prefix_cache import MambaSpec, StateTensor

__all__ = ["Mamba2Config", "Mamba2Mixer"]


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """The sizes and options of a Mamba-2 mixer.

    Attributes:
        hidden_size: width of the residual stream.
        num_heads: heads of the recurrence.
        head_dim: channels per head.
        num_groups: B and C are shared by the heads of a group; divides ``num_heads``.
        state_size: numbers that each channel remembers.
        kernel_size: tokens that the convolution sees.
        activation: after the convolution, by transformers' name.
        norm_eps: of the gated norm.
        conv_bias: whether the convolution has a bias.
        projection_bias: whether the projections in and out have biases.
        dt_limit: least and greatest step size.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel_size: int
    activation: str
    norm_eps: float
    conv_bias: bool
    projection_bias: bool
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


class Mamba2Mixer(nn.Module):
    """Mixes a request's tokens through a state of fixed size::

        x ─► in ─┬─► conv ─► act ─► x | B | C ─► scan ─► + D x ─► norm(y * silu(gate)) ─► out
                 ├─► dt ─► softplus ───────────────┘                            │
                 └─► gate ──────────────────────────────────────────────────────┘

    Args:
        layer_name: unique in the model; its state is kept under it.
        config: sizes and options.
        block_size: tokens per block.
        dtype: of weights, activations and the convolution's state. The recurrence runs, and its
            state is kept, in float32: rounding it to a shorter type at every token adds up.
        device: of the same.

    Raises:
        ValueError: an unknown activation, or a convolution over fewer than 2 tokens.
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
        super().__init__()
        self.config = config
        hidden, inner, bias = config.hidden_size, config.inner_size, config.projection_bias
        self.conv_splits = (inner, config.group_state_size, config.group_state_size)
        self.in_splits = (inner, sum(self.conv_splits), config.num_heads)
        self.activation = activation_of(config.activation)
        in_parts = {"in_proj": sum(self.in_splits)}
        self.in_proj = Linear(hidden, in_parts, bias=bias, dtype=dtype, device=device)
        self.conv = CausalConv(
            sum(self.conv_splits),
            config.kernel_size,
            bias=config.conv_bias,
            dtype=dtype,
            device=device,
        )
        # `a` is the logarithm of -A until finish_loading.
        per_head = torch.empty(3, config.num_heads, dtype=torch.float32, device=device)
        self.a, self.d, self.dt_bias = (nn.Parameter(v, requires_grad=False) for v in per_head)
        self.norm = GatedNorm(config, dtype, device)
        self.out_proj = Linear(inner, {"out_proj": hidden}, bias=bias, dtype=dtype, device=device)
        ssm_shape = (config.num_heads, config.head_dim, config.state_size)
        kept = (
            StateTensor(self.conv.state_shape, dtype),
            StateTensor(ssm_shape, torch.float32),
        )
        self.state = StateLayer(layer_name, MambaSpec(block_size, kept))

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names under ``prefix``, each with the tensor that receives it."""
        yield from self.in_proj.targets(prefix)
        yield from self.out_proj.targets(prefix)
        yield from self.conv.targets(f"{prefix}conv1d.")
        yield f"{prefix}norm.weight", self.norm.weight.data
        yield f"{prefix}A_log", self.a.data
        yield f"{prefix}D", self.d.data
        yield f"{prefix}dt_bias", self.dt_bias.data

    def finish_loading(self) -> None:
        """Turn the loaded logarithms into A; call once."""
        self.a.exp_().neg_()

    def forward(self, x: Tensor, step: AttentionStep, layout: PackedLayout) -> Tensor:
        """Mix ``(num_tokens, hidden_size)`` and move every request's state on."""
        conv_state, ssm_state = self.state.read(step)
        gate, convolved, dt = self.in_proj(x).split(self.in_splits, dim=-1)
        convolved, conv_state = self.conv(convolved, conv_state, layout)
        u, b, c = self.activation(convolved).float().split(self.conv_splits, dim=-1)
        u = u.unflatten(-1, (self.config.num_heads, -1))
        # Decodes too, which transformers leaves unlimited: a token must not depend on whether it
        # was part of a prompt.
        dt = F.softplus(dt.float() + self.dt_bias).clamp(*self.config.dt_limit)
        b = b.unflatten(-1, (self.config.num_groups, -1))
        c = c.unflatten(-1, (self.config.num_groups, -1))
        update = fused_state_update(x.device) if layout.num_decodes == layout.num_reqs else None
        if update is not None:
            # One step size and one decay for all of a head, told by strides of 0.
            decay = self.a[:, None, None].expand(ssm_state.shape[1:])
            y = update(ssm_state, u, dt[..., None].expand_as(u), decay, b, c)
        else:
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
