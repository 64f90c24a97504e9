"""The gated delta rule: a state that corrects what it has kept under a key, and forgets.

For every token of a request in its order, per head, with keys and queries of length one::

    S = exp(g) S                           (key_dim, value_dim), g <= 0
    S = S + k (beta (v - k S))^T           what lies under the key becomes the value, by beta
    y = q S / sqrt(key_dim)

Several value heads share the keys and queries of one head.
Source: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.layer import AttentionStep, StateLayer
from engine.checkpoints.config_file import activation_of
from engine.checkpoints.quantized_weight import Target
from engine.layers.linear import Linear
from engine.layers.mamba import CausalConv, PackedLayout, TimeOrder
from prefix_cache import MambaSpec, StateTensor

_LEAST = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRuleConfig:
    """The sizes and options of a :class:`DeltaRuleMixer`.

    Raises:
        ValueError: value heads cannot share key heads evenly.
    """

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    activation: str
    norm_eps: float

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                "linear_num_value_heads must be a multiple of linear_num_key_heads, "
                f"got {self.num_value_heads} and {self.num_key_heads}"
            )


def delta_rule(
    rows: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], states: Tensor, order: TimeOrder
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over the tokens of several requests; see the module's note.

    The requests' first tokens are one batch, their second tokens the next, and so on: a step of
    decodes is a single batch.

    Args:
        rows: of ``n`` tokens in float32: q and k, ``(n, heads, key_dim)``, v ``(n, heads,
            value_dim)``, the factor that the state keeps and beta, ``(n, heads)``.
        states: ``(num_reqs, heads, key_dim, value_dim)`` before the tokens.

    Returns:
        ``y`` ``(n, heads, value_dim)``, and the states after each request's last token.
    """
    q, k, v, kept, beta = (each.index_select(0, order.items).flatten(0, 1) for each in rows)
    heads, kept = states.shape[1], kept[:, None, None]
    pairs, columns = torch.stack((k, q), dim=1), k.unsqueeze(-1)
    wanted, held = (beta[:, None] * v).unsqueeze(1), beta[:, None, None] * kept
    h = states.index_select(0, order.sequences).flatten(0, 1)
    # What lies under key and query before a token, and what it changes: four products a token.
    found, change = v.new_empty(len(v), 2, v.shape[1]), torch.empty_like(wanted)
    for now in order.batches():
        here = slice(now.start * heads, now.stop * heads)
        going = h[: here.stop - here.start]
        torch.bmm(pairs[here], going, out=found[here])
        torch.addcmul(wanted[here], held[here], found[here, :1], value=-1, out=change[here])
        going.mul_(kept[here]).baddbmm_(columns[here], change[here])
    likeness = (q * k).sum(-1, keepdim=True)
    y = (kept[:, 0] * found[:, 1] + likeness * change[:, 0]).unflatten(0, (-1, heads))
    h = h.unflatten(0, (-1, heads))
    return (
        torch.empty_like(y).index_copy_(0, order.items, y),
        torch.empty_like(h).index_copy_(0, order.sequences, h),
    )


class DeltaRuleMixer(nn.Module):
    """Mixes a request's tokens through a state of fixed size::

        x ─┬─► in_proj_qkvz ─┬─► q | k | v ─► conv ─► act ─► delta rule ─► norm ─► * ─► out
           │                 └─► z ─► silu ────────────────────│─────────────────┘
           └─► in_proj_ba ─► beta, decay ──────────────────────┘

    Args:
        layer_name: unique in the model; its state is kept under it.
        dtype: of weights, activations and the convolution's state; the recurrence's is float32.

    Raises:
        ValueError: an unknown activation, or a convolution over fewer than 2 tokens.
    """

    def __init__(
        self,
        layer_name: str,
        config: DeltaRuleConfig,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config = config
        self.activation = activation_of(config.activation)
        hidden, heads = config.hidden_size, config.num_value_heads
        keys, values = config.num_key_heads * config.key_dim, heads * config.value_dim
        self.conv_splits = (keys, keys, values)
        parts = {"in_proj_qkvz": 2 * keys + 2 * values}
        self.in_proj = Linear(hidden, parts, dtype=dtype, device=device)
        self.gates = Linear(hidden, {"in_proj_ba": 2 * heads}, dtype=dtype, device=device)
        self.out_proj = Linear(values, {"out_proj": hidden}, dtype=dtype, device=device)
        width = 2 * keys + values
        self.conv = CausalConv(width, config.kernel_size, bias=False, dtype=dtype, device=device)
        per_head = torch.empty(2, heads, dtype=torch.float32, device=device)
        self.a, self.dt_bias = (nn.Parameter(v, requires_grad=False) for v in per_head)
        norm = torch.empty(config.value_dim, dtype=dtype, device=device)
        self.norm_weight = nn.Parameter(norm, requires_grad=False)
        shape = (heads, config.key_dim, config.value_dim)
        kept = (StateTensor(self.conv.state_shape, dtype), StateTensor(shape, torch.float32))
        self.state = StateLayer(layer_name, MambaSpec(block_size, kept))

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Checkpoint names under ``prefix``, each with the tensor that receives it."""
        for product in (self.in_proj, self.gates, self.out_proj):
            yield from product.targets(prefix)
        yield from self.conv.targets(f"{prefix}conv1d.")
        yield f"{prefix}A_log", self.a.data
        yield f"{prefix}dt_bias", self.dt_bias.data
        yield f"{prefix}norm.weight", self.norm_weight.data

    def finish_loading(self) -> None:
        """Turn the loaded logarithms into A; call once."""
        self.a.exp_().neg_()

    def forward(self, x: Tensor, step: AttentionStep, layout: PackedLayout) -> Tensor:
        """Mix ``(num_tokens, hidden_size)`` and move every request's state on."""
        config, num_tokens = self.config, len(x)
        heads, groups = config.num_value_heads, config.num_key_heads
        shared = heads // groups
        conv_state, state = self.state.read(step)
        # Of each key head, what belongs to it lies together.
        splits = (*2 * (config.key_dim,), *2 * (shared * config.value_dim,))
        q, k, v, z = self.in_proj(x).view(num_tokens, groups, -1).split(splits, dim=-1)
        b, a = self.gates(x).view(num_tokens, groups, -1).chunk(2, dim=-1)
        joined = torch.cat([part.flatten(1) for part in (q, k, v)], dim=1)
        joined, conv_state = self.conv(joined, conv_state, layout)
        q, k, v = self.activation(joined).float().split(self.conv_splits, dim=-1)
        q, k = (_normed(part.view(num_tokens, groups, -1)) for part in (q, k))
        q, k = (part.repeat_interleave(shared, dim=1) for part in (q, k))
        step_size = F.softplus(a.reshape(num_tokens, heads).float() + self.dt_bias)
        beta = b.reshape(num_tokens, heads).sigmoid().float()
        rows = q * config.key_dim**-0.5, k, v.unflatten(1, (heads, -1))
        kept = torch.exp(step_size * self.a)
        y, state = delta_rule((*rows, kept, beta), state, layout.time_order)
        self.state.write(step, conv_state, state)
        normed = F.rms_norm(y, y.shape[-1:], None, config.norm_eps) * self.norm_weight.float()
        gated = normed.flatten(1) * F.silu(z.reshape(num_tokens, -1).float())
        mixed: Tensor = self.out_proj(gated.to(x.dtype))
        return mixed


def _normed(heads: Tensor) -> Tensor:
    """Heads of length one."""
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _LEAST)
