"""The Mamba-1 mixer with norms on the step size, B and C.

Sources: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023;
Lieber et al., arXiv:2403.19887, section 2 on the norms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.layer import AttentionStep
from engine.layers.layer_ops import LayerOps
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.recurrent_mixer import (
    PackedLayout,
    RecurrentConfig,
    RecurrentMixer,
    TimeOrder,
)

__all__ = ["MambaConfig", "MambaMixer"]


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
    """One token of each request; see :func:`selective_scan` for what is computed."""
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
    matrix form over time as :mod:`engine.layers.mamba2` has it.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig(RecurrentConfig):
    """The sizes and options of a Mamba-1 mixer.

    Attributes:
        inner_size: channels of the recurrence.
        dt_rank: width of the bottleneck before the step sizes.
    """

    inner_size: int
    dt_rank: int


class MambaMixer(RecurrentMixer):
    """Mixes a request's tokens through a state of fixed size::

        x ─► in ─┬─► conv ─► act ─┬────────────────────────────► scan ─► + D u ─► * ─► out
                 │                └─► dt | B | C ─► norms ─────────┘              │
                 └──────────────────────── gate ─► silu ──────────────────────────┘

    Arguments as of :class:`RecurrentMixer`, but for widths and shapes; ``ops`` computes norms.
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
        inner, rank, size = config.inner_size, config.dt_rank, config.state_size
        super().__init__(
            layer_name,
            config,
            block_size,
            in_width=2 * inner,
            conv_width=inner,
            state_shape=(inner, size),
            dtype=dtype,
            device=device,
        )
        self.split_sizes = (rank, size, size)
        self.x_proj = Linear(inner, {"x_proj": rank + 2 * size}, dtype=dtype, device=device)
        self.dt_norm, self.b_norm, self.c_norm = (
            RMSNorm(width, config.norm_eps, dtype=dtype, device=device, ops=ops)
            for width in self.split_sizes
        )
        self.dt_proj = Linear(rank, {"dt_proj": inner}, bias=True, dtype=dtype, device=device)
        a = torch.empty(inner, size, dtype=torch.float32, device=device)
        self.a = nn.Parameter(a, requires_grad=False)
        d = torch.empty(inner, dtype=torch.float32, device=device)
        self.d = nn.Parameter(d, requires_grad=False)

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names under ``prefix``, each with the tensor that receives it."""
        yield from super().targets(prefix)
        yield f"{prefix}dt_layernorm.weight", self.dt_norm.weight.data
        yield f"{prefix}b_layernorm.weight", self.b_norm.weight.data
        yield f"{prefix}c_layernorm.weight", self.c_norm.weight.data

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
        inputs = ScanInputs(x=u, dt=dt, b=b, c=c)
        if layout.num_decodes < layout.num_reqs:
            y, ssm_state = selective_scan(inputs, self.a, ssm_state, layout.time_order)
        else:
            y, ssm_state = selective_step(inputs, self.a, ssm_state)
        self.state.write(step, conv_state, ssm_state)
        y.addcmul_(u, self.d).mul_(F.silu(gate.float()))
        mixed: Tensor = self.out_proj(y.to(x.dtype))
        return mixed
