"""The gated delta rule: a decaying associative state whose values are corrected per key.

For every token of a request in order, per head, with keys and queries of unit length::

    S = exp(g) S                           (key_dim, value_dim), g <= 0
    S = S + k (beta (v - k S))^T           move the value stored under k towards v, by beta
    y = q S / sqrt(key_dim)

Several value heads share the keys and queries of one head. Whole prompts run in matrix form: within
a chunk, with ``G[t] = g[0] + ... + g[t]``, the changes ``u[t] = beta (v - k S)`` solve::

    u[t] + beta[t] sum over s < t of (k[t] . k[s]) exp(G[t] - G[s]) u[s]
                       = beta[t] (v[t] - exp(G[t]) k[t] S_before)
    y[t] = (sum over s <= t of (q[t] . k[s]) exp(G[t] - G[s]) u[s] + exp(G[t]) q[t] S_before)
           / sqrt(key_dim)

Source: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from engine.attention.layer import AttentionStep
from engine.attention.packed_layout import Chunks
from engine.checkpoints.quantized_weight import Target
from engine.layers.layer_ops import LayerOps, TensorOptions, empty_parameter
from engine.layers.linear import Linear
from engine.layers.mamba import CausalConv, RecurrentMixer, Rows, step_and_scan, weighted

_EPSILON = 1e-6


def delta_step(ops: LayerOps, rows: Rows, states: Tensor) -> Tensor:
    """Run one token of each request; see :func:`delta_scan`."""
    q, k, v, g, beta = rows
    kept, beta = torch.exp(g)[..., None], beta[..., None]
    # One product reads what the state holds under both key and query.
    under_key, under_query = ops.matmul(torch.stack((k, q), dim=2), states).unbind(2)
    change = beta * (v - kept * under_key)
    states.mul_(kept[..., None]).addcmul_(k[..., None], change.unsqueeze(2))
    return kept * under_query + (q * k).sum(-1, keepdim=True) * change


def delta_scan(rows: Rows, states: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Run all tokens of several requests: matrix form within chunks, a recurrence over chunks.

    Args:
        rows: q and k, ``(n, heads, key_dim)``; v, ``(n, heads, value_dim)``; g and beta,
            ``(n, heads)``. q already includes the scale of y.
        states: ``(num_reqs, heads, key_dim, value_dim)`` float32 before the tokens.

    Returns:
        ``y`` ``(num_tokens, heads, value_dim)``, and the states after each request's last token.
    """
    # (chunks, heads, size, ...); padding is all zeros and changes nothing.
    q, k, v, g, beta = (chunks.pad(each).transpose(1, 2) for each in rows)
    # In float64: sums of strong decays are large, but only their small differences matter.
    sums = g.double().cumsum(-1)
    to_each = (sums[..., :, None] - sums[..., None, :]).float().exp_()
    beta, keys = beta[..., None], k.transpose(-1, -2)
    # Future tokens are masked last, as in ssd_scan.
    overlaps = (k @ keys).mul_(to_each).mul_(beta).tril_(-1)
    weights = (q @ keys).mul_(to_each).tril_()
    from_start = sums.float().exp()[..., None]
    decays = from_start[:, :, -1:]
    keys = keys * (sums[..., -1:] - sums).float().exp().unsqueeze(2)
    scaled_v, scaled_k, scaled_q = beta * v, beta * from_start * k, from_start * q
    order, y, change = chunks.order, torch.empty_like(v), torch.empty_like(v)
    h = states.index_select(0, order.sequences)
    for batch in order.batches():
        items = order.items[batch]
        state = h[: len(items)]
        right = scaled_v[items] - scaled_k[items] @ state
        changed = torch.linalg.solve_triangular(
            overlaps[items], right, upper=False, unitriangular=True
        )
        change.index_copy_(0, items, changed)
        y.index_copy_(0, items, scaled_q[items] @ state)
        state.mul_(decays[items]).add_(keys[items] @ changed)
    y += weighted(weights, change)
    y = y.transpose(1, 2).flatten(0, 1).index_select(0, chunks.slots)
    return y, torch.empty_like(h).index_copy_(0, order.sequences, h)


class DeltaRuleMixer(RecurrentMixer):
    """Mixes a request's tokens through a state of fixed size::

        x ─┬─► in_proj ─┬─► q | k | v ─► conv ─► act ─► delta rule ─► norm ─► * ─► out
           │            └─► z ─► silu ────────────────────│─────────────────┘
           └─► gates ─► beta, decay ──────────────────────┘

    Arguments as for :class:`RecurrentMixer`, except the convolution and the shape.

    Args:
        interleaved: if true, one matrix computes q, k, v and z, and another the gates, key head by
            key head; otherwise z and each gate have separate matrices.

    Raises:
        ValueError: also if the number of value heads is no multiple of the number of key heads.
    """

    def __init__(
        self,
        layer_name: str,
        config: PreTrainedConfig,
        block_size: int,
        *,
        interleaved: bool = True,
        ops: LayerOps | None = None,
        **options: Unpack[TensorOptions],
    ) -> None:
        heads, groups = config.linear_num_value_heads, config.linear_num_key_heads
        if heads % groups:
            raise ValueError(
                "linear_num_value_heads must be a multiple of linear_num_key_heads, "
                f"got {heads} and {groups}"
            )
        key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        keys, values = groups * key_dim, heads * value_dim
        width = 2 * keys + values
        conv = CausalConv(width, config.linear_conv_kernel_dim, bias=False, **options)
        shape, common = (heads, key_dim, value_dim), (layer_name, config, block_size)
        super().__init__(*common, conv=conv, state_shape=shape, ops=ops)
        self.num_heads, self.num_groups, self.interleaved = heads, groups, interleaved
        self.key_dim, self.value_dim = key_dim, value_dim
        self.norm_eps, self.conv_splits = config.rms_norm_eps, (keys, keys, values)
        hidden = config.hidden_size
        parts, gates = {"in_proj_qkvz": width + values}, {"in_proj_ba": 2 * heads}
        if not interleaved:
            parts = {"in_proj_qkv": width, "in_proj_z": values}
            gates = {"in_proj_b": heads, "in_proj_a": heads}
        self.in_proj = Linear(hidden, parts, **options)
        self.gates = Linear(hidden, gates, **options)
        self.out_proj = Linear(values, {"out_proj": hidden}, **options)
        self.norm_weight = empty_parameter(value_dim, **options)
        options["dtype"] = torch.float32
        self.a, self.dt_bias = (empty_parameter(heads, **options) for _ in range(2))

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Yield checkpoint names under ``prefix``, each with the tensor to load it into."""
        yield from super().targets(prefix)
        yield f"{prefix}dt_bias", self.dt_bias.data
        yield f"{prefix}norm.weight", self.norm_weight.data

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Compute q, k and v concatenated, z, and the gates for beta and the decay."""
        if not self.interleaved:
            joined, z = self.in_proj(x).split((sum(self.conv_splits), self.conv_splits[-1]), dim=-1)
            return joined, z, *self.gates(x).chunk(2, dim=-1)
        values = self.num_heads // self.num_groups * self.value_dim
        # The channels of each key head are contiguous.
        splits = (self.key_dim, self.key_dim, values, values)
        shape = len(x), self.num_groups, -1
        q, k, v, z = self.in_proj(x).view(shape).split(splits, dim=-1)
        b, a = self.gates(x).view(shape).chunk(2, dim=-1)
        return torch.cat([part.flatten(1) for part in (q, k, v)], dim=1), z, b, a

    def forward(self, x: Tensor, step: AttentionStep) -> Tensor:
        """Mix ``(num_tokens, hidden_size)`` and advance every request's state."""
        num_tokens, heads, groups = len(x), self.num_heads, self.num_groups
        layout = self.state.metadata(step).layout
        conv_state, state = self.state.read(step)
        joined, z, b, a = self._project(x)
        joined, conv_state = self.conv(joined, conv_state, layout)
        joined = self.ops.each(self.activation, joined).float()
        q, k, v = joined.split(self.conv_splits, dim=-1)
        q, k = (_unit_length(part.view(num_tokens, groups, -1)) for part in (q, k))
        q, k = (part.repeat_interleave(heads // groups, dim=1) for part in (q, k))
        shifted = a.reshape(num_tokens, heads).float() + self.dt_bias
        step_size = self.ops.each(F.softplus, shifted)
        beta = self.ops.each(torch.sigmoid, b.reshape(num_tokens, heads)).float()
        v = v.unflatten(1, (heads, -1))
        rows = q * self.key_dim**-0.5, k, v, step_size * self.a, beta
        one = partial(delta_step, self.ops)
        y, state = step_and_scan(one, delta_scan, rows, state, layout, self.ops)
        self.state.write(step, conv_state, state)
        normed = F.rms_norm(y, y.shape[-1:], None, self.norm_eps) * self.norm_weight.float()
        gated = normed.flatten(1) * self.ops.each(F.silu, z.reshape(num_tokens, -1).float())
        return self.out_proj(gated.to(x.dtype))


def _unit_length(heads: Tensor) -> Tensor:
    """Scale heads to unit length."""
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _EPSILON)
