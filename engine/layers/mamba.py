"""The Mamba-1 mixer as Jamba has it: with norms on the step size, B and C.

Sources: Gu and Dao, "Mamba", 2023; Lieber et al., "Jamba: A Hybrid Transformer-Mamba Language
Model", 2024 (section 2 on the norms).
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
from engine.layers.layer_ops import LayerOps
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.packed_layout import PackedLayout
from engine.layers.selective_scan import ScanInputs, selective_scan
from prefix_cache import MambaSpec, StateTensor

__all__ = ["MambaConfig", "MambaMixer"]


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """The sizes and options of a Mamba-1 mixer.

    Attributes:
        hidden_size: width of the residual stream.
        inner_size: channels of the recurrence.
        state_size: numbers that each channel remembers.
        dt_rank: width of the bottleneck before the step sizes.
        kernel_size: tokens that the convolution sees.
        activation: after the convolution, by transformers' name.
        norm_eps: of the norms.
        conv_bias: whether the convolution has a bias.
        projection_bias: whether the projections in and out have biases.
    """

    hidden_size: int
    inner_size: int
    state_size: int
    dt_rank: int
    kernel_size: int
    activation: str
    norm_eps: float
    conv_bias: bool
    projection_bias: bool


class MambaMixer(nn.Module):
    """Mixes a request's tokens through a state of fixed size::

        x ─► in ─┬─► conv ─► act ─┬────────────────────────────► scan ─► + D u ─► * ─► out
                 │                └─► dt | B | C ─► norms ─────────┘              │
                 └──────────────────────── gate ─► silu ──────────────────────────┘

    Args:
        layer_name: unique in the model; its state is kept under it.
        config: sizes and options.
        block_size: tokens per block.
        dtype: of weights, activations and the convolution's state. The recurrence runs, and its
            state is kept, in float32: rounding it to a shorter type at every token adds up.
        device: of the same.
        ops: what computes norms.

    Raises:
        ValueError: an unknown activation, or a convolution over fewer than 2 tokens.
    """

    def __init__(
        self,
        layer_name: str,
        config: MambaConfig,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ops: LayerOps | None = None,
    ) -> None:
        super().__init__()
        hidden, inner, size = config.hidden_size, config.inner_size, config.state_size
        rank, eps, bias = config.dt_rank, config.norm_eps, config.projection_bias
        self.split_sizes = (rank, size, size)
        self.activation = activation_of(config.activation)
        self.in_proj = Linear(hidden, {"in_proj": 2 * inner}, bias=bias, dtype=dtype, device=device)
        self.conv = CausalConv(
            inner, config.kernel_size, bias=config.conv_bias, dtype=dtype, device=device
        )
        self.x_proj = Linear(inner, {"x_proj": rank + 2 * size}, dtype=dtype, device=device)
        self.dt_norm, self.b_norm, self.c_norm = (
            RMSNorm(width, eps, dtype=dtype, device=device, ops=ops) for width in self.split_sizes
        )
        self.dt_proj = Linear(rank, {"dt_proj": inner}, bias=True, dtype=dtype, device=device)
        # The logarithm of -A until finish_loading.
        a = torch.empty(inner, size, dtype=torch.float32, device=device)
        self.a = nn.Parameter(a, requires_grad=False)
        d = torch.empty(inner, dtype=torch.float32, device=device)
        self.d = nn.Parameter(d, requires_grad=False)
        self.out_proj = Linear(inner, {"out_proj": hidden}, bias=bias, dtype=dtype, device=device)
        kept = (
            StateTensor(self.conv.state_shape, dtype),
            StateTensor((inner, size), torch.float32),
        )
        self.state = StateLayer(layer_name, MambaSpec(block_size, kept))

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names under ``prefix``, each with the tensor that receives it."""
        for linear in (self.in_proj, self.x_proj, self.dt_proj, self.out_proj):
            yield from linear.targets(prefix)
        yield from self.conv.targets(f"{prefix}conv1d.")
        yield f"{prefix}dt_layernorm.weight", self.dt_norm.weight.data
        yield f"{prefix}b_layernorm.weight", self.b_norm.weight.data
        yield f"{prefix}c_layernorm.weight", self.c_norm.weight.data
        yield f"{prefix}A_log", self.a.data
        yield f"{prefix}D", self.d.data

    def finish_loading(self) -> None:
        """Turn the loaded logarithms into A; call once."""
        self.a.exp_().neg_()

    def forward(self, x: Tensor, step: AttentionStep, layout: PackedLayout) -> Tensor:
        """Mix ``(num_tokens, hidden_size)`` and move every request's state on."""
        conv_state, ssm_state = self.state.read(step)
        u, gate = self.in_proj(x).chunk(2, dim=-1)
        u, conv_state = self.conv(u, conv_state, layout)
        u = self.activation(u)
        dt, b, c = self.x_proj(u).split(self.split_sizes, dim=-1)
        dt = F.softplus(self.dt_proj(self.dt_norm(dt.contiguous())).float())
        b = self.b_norm(b.contiguous()).float()
        c = self.c_norm(c.contiguous()).float()
        u = u.float()
        update = fused_state_update(x.device) if layout.num_decodes == layout.num_reqs else None
        if update is not None:
            y = update(ssm_state, u, dt, self.a, b, c)
        else:
            inputs = ScanInputs(x=u, dt=dt, b=b, c=c)
            y, ssm_state = selective_scan(inputs, self.a, ssm_state, layout.time_order)
        self.state.write(step, conv_state, ssm_state)
        y.addcmul_(u, self.d).mul_(F.silu(gate.float()))
        mixed: Tensor = self.out_proj(y.to(x.dtype))
        return mixed
