"""Mamba mixers: Mamba-1 with norms on the step size, B and C, and Mamba-2.

Sources: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023;
Lieber et al., arXiv:2403.19887, section 2 on the norms; Dao and Gu, "Transformers are SSMs:
Generalized Models and Efficient Algorithms Through Structured State Space Duality", 2024.

Mamba-2 has one decay per head, and a gated norm before the output projection (section 7). One
decay per head and token lets whole prompts run in matrix form (section 6)::

    h[t] = exp(a[t]) h[t-1] + x[t] B[t]^T          (head_dim, state_size) per head
    y[t] = h[t] C[t]

Within a chunk, with ``A[t] = a[0] + ... + a[t]``::

    y[t] =   sum over s <= t of (C[t] . B[s]) exp(A[t] - A[s]) x[s]      like attention
           + exp(A[t]) h_before C[t]                                     from the state

Heads share B and C in groups, as grouped-query attention shares keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from engine.attention.layer import AttentionStep, StateLayer
from engine.attention.packed_layout import Chunks, PackedLayout
from engine.checkpoints.config_file import activation_of
from engine.checkpoints.quantized_weight import Target
from engine.layers.layer_ops import LayerOps, RMSNorm, TensorOptions, empty_parameter
from engine.layers.linear import Linear
from engine.resources.device import are_finite
from prefix_cache import MambaSpec, StateTensor


class CausalConv(nn.Module):
    """``y[t] = bias + sum over k of weight[k] * x[t - kernel_size + 1 + k]``, per channel.

    The inputs before a request's tokens come from its state, which is zero at the start.

    Args:
        kernel_size: number of tokens that an output depends on, including its own; at least 2.

    Raises:
        ValueError: the kernel sees no earlier token.
    """

    def __init__(
        self, channels: int, kernel_size: int, *, bias: bool, **options: Unpack[TensorOptions]
    ) -> None:
        super().__init__()
        if kernel_size < 2:
            raise ValueError(f"the convolution must see at least 2 tokens, got {kernel_size}")
        # One row per tap, so that a tap multiplies whole rows of tokens.
        self.taps = empty_parameter(kernel_size, channels, **options)
        self.bias = empty_parameter(channels, **options) if bias else None

    @property
    def state_shape(self) -> tuple[int, int]:
        """``(kernel_size - 1, channels)``: the last inputs, oldest first."""
        kernel_size, channels = self.taps.shape
        return kernel_size - 1, channels

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Yield checkpoint names under ``prefix``, each with the tensor to load it into."""
        yield f"{prefix}weight", self.taps.data.T.unsqueeze(1)
        if self.bias is not None:
            yield f"{prefix}bias", self.bias.data

    def forward(self, x: Tensor, state: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
        """Convolve each request's tokens after its state.

        Args:
            x: ``(num_tokens, channels)``; the output has the same shape.
            state: ``(num_reqs, kernel_size - 1, channels)``, as is the returned next state.
        """
        history = len(self.taps) - 1
        rows = layout.history_rows(history)
        table = x.new_empty(len(x) + len(rows.histories), x.shape[1])
        table.index_copy_(0, rows.tokens, x)
        table.index_copy_(0, rows.histories, state.flatten(0, 1).to(x.dtype))
        # Outputs of windows that span two requests are computed too, and dropped: this is cheaper
        # than gathering the rows of every tap.
        num_windows = len(table) - history
        taps = self.taps.float()
        windows = taps[0] * table[:num_windows].float()
        for tap in range(1, history + 1):
            windows.addcmul_(taps[tap], table[tap : tap + num_windows].float())
        output = windows.index_select(0, rows.tokens - history)
        if self.bias is not None:
            output += self.bias
        next_state = table.index_select(0, rows.next_histories).view_as(state)
        return output.to(x.dtype), next_state


class RecurrentMixer(nn.Module):
    """Base of mixers with a convolution and a recurrence; a subclass adds ``a`` and the products.

    Args:
        layer_name: unique name in the model, under which the state is kept.
        config: transformers config, with its names for the sizes.
        conv: the convolution before the recurrence; its state has its weights' type. The recurrence
            and its state use float32, because rounding to a shorter type at every token accumulates
            errors.
        state_shape: of the recurrence: channels, possibly split into heads, and the state size.
        ops: computes everything except the recurrence; None: plain torch.

    Attributes:
        a: the logarithm of -A until :meth:`finish_loading`, then A.

    Raises:
        ValueError: the activation is unknown, or the convolution spans fewer than 2 tokens.
    """

    a: nn.Parameter

    def __init__(
        self,
        layer_name: str,
        config: PreTrainedConfig,
        block_size: int,
        *,
        conv: CausalConv,
        state_shape: tuple[int, ...],
        ops: LayerOps | None,
    ) -> None:
        super().__init__()
        self.ops = ops or LayerOps()
        self.activation = activation_of(config.hidden_act)
        self.conv = conv
        of_conv = StateTensor(conv.state_shape, conv.taps.dtype)
        kept = (of_conv, StateTensor(state_shape, torch.float32))
        self.state = StateLayer(layer_name, MambaSpec(block_size, kept))

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Yield checkpoint names under ``prefix``, each with the tensor to load it into."""
        for module in self.children():
            if isinstance(module, Linear):
                yield from module.targets(prefix)
        yield from self.conv.targets(f"{prefix}conv1d.")
        yield f"{prefix}A_log", self.a.data

    def finish_loading(self) -> None:
        """Convert the loaded logarithms to A; call once."""
        self.a.exp_().neg_()


Rows: TypeAlias = tuple[Tensor, ...]
"""Inputs of a recurrence, each with one row per token, in float32."""


Step: TypeAlias = Callable[[Rows, Tensor], Tensor]
"""Runs one token of each request, given its rows and the states, which it updates in place."""


def step_and_scan(
    step: Step,
    scan: Callable[[Rows, Tensor, Chunks], tuple[Tensor, Tensor]],
    rows: Rows,
    states: Tensor,
    layout: PackedLayout,
    ops: LayerOps,
) -> tuple[Tensor, Tensor]:
    """Run decodes as one batch, then the longer requests.

    Args:
        scan: runs all tokens of several requests.
        states: ``(num_reqs, ...)`` before the tokens.

    Returns:
        The output of each token, and the states after each request's last token.
    """
    if ops.deterministic:
        return scan_by_steps(step, rows, states, layout)
    num_decodes = layout.num_decodes
    if num_decodes == layout.num_reqs:
        return step(rows, states), states
    decoded = step(tuple(each[:num_decodes] for each in rows), states[:num_decodes])
    rest = tuple(each[num_decodes:] for each in rows)
    prefilled, after = scan(rest, states[num_decodes:], layout.prefill_chunks)
    return torch.cat([decoded, prefilled]), torch.cat([states[:num_decodes], after])


def scan_by_steps(
    step: Step, rows: Rows, states: Tensor, layout: PackedLayout
) -> tuple[Tensor, Tensor]:
    """Run token by token, so that rounding does not depend on where a prompt is split.

    The requests' first tokens form one batch, their second tokens the next, and so on.
    """
    if layout.num_decodes == layout.num_reqs:
        return step(rows, states), states
    order = layout.time_order
    rows = tuple(each.index_select(0, order.items) for each in rows)
    h = states.index_select(0, order.sequences)
    outputs = []
    for batch in order.batches():
        state = h[: batch.stop - batch.start]
        outputs.append(step(tuple(each[batch] for each in rows), state))
    y = torch.cat(outputs)
    return (
        torch.empty_like(y).index_copy_(0, order.items, y),
        torch.empty_like(h).index_copy_(0, order.sequences, h),
    )


def selective_step(ops: LayerOps, a: Tensor, rows: Rows, states: Tensor) -> Tensor:
    """Run one token of each request::

        h = exp(dt * A) * h + (dt * x) B^T        (channels, state_size)
        y = h C                                   (channels,)

    The decays within a channel differ from state to state, so there is no matrix form over time
    like that of :func:`ssd_scan`.

    Args:
        rows: x and dt, ``(n, channels)``; B and C, ``(n, state_size)``.
    """
    x, dt, b, c = rows
    states.mul_(torch.exp(dt[:, :, None] * a))
    states.addcmul_((x * dt)[:, :, None], b[:, None, :])
    return ops.matmul(states, c[:, :, None]).squeeze(-1)


class MambaMixer(RecurrentMixer):
    """Mixes a request's tokens through a state of fixed size::

        x ─► in ─┬─► conv ─► act ─┬────────────────────────────► scan ─► + D u ─► * ─► out
                 │                └─► dt | B | C ─► norms ─────────┘              │
                 └──────────────────────── gate ─► silu ──────────────────────────┘

    Arguments as for :class:`RecurrentMixer`, except the convolution and the shape.

    Attributes:
        d: weight of each channel's skip connection.
    """

    def __init__(
        self,
        layer_name: str,
        config: PreTrainedConfig,
        block_size: int,
        *,
        ops: LayerOps | None = None,
        **options: Unpack[TensorOptions],
    ) -> None:
        inner = config.mamba_expand * config.hidden_size
        rank, size = config.mamba_dt_rank, config.mamba_d_state
        conv = CausalConv(inner, config.mamba_d_conv, bias=config.mamba_conv_bias, **options)
        shape, common = (inner, size), (layer_name, config, block_size)
        super().__init__(*common, conv=conv, state_shape=shape, ops=ops)
        hidden, bias = config.hidden_size, config.mamba_proj_bias
        self.in_proj = Linear(hidden, {"in_proj": 2 * inner}, bias=bias, **options)
        self.out_proj = Linear(inner, {"out_proj": hidden}, bias=bias, **options)
        self.split_sizes = (rank, size, size)
        self.x_proj = Linear(inner, {"x_proj": rank + 2 * size}, **options)
        self.dt_norm, self.b_norm, self.c_norm = (
            RMSNorm(width, config.rms_norm_eps, ops=ops, **options) for width in self.split_sizes
        )
        self.dt_proj = Linear(rank, {"dt_proj": inner}, bias=True, **options)
        options["dtype"] = torch.float32
        self.a = empty_parameter(inner, size, **options)
        self.d = empty_parameter(inner, **options)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Yield checkpoint names under ``prefix``, each with the tensor to load it into."""
        yield from super().targets(prefix)
        yield f"{prefix}D", self.d.data
        yield f"{prefix}dt_layernorm.weight", self.dt_norm.weight.data
        yield f"{prefix}b_layernorm.weight", self.b_norm.weight.data
        yield f"{prefix}c_layernorm.weight", self.c_norm.weight.data

    def forward(self, x: Tensor, step: AttentionStep) -> Tensor:
        """Mix ``(num_tokens, hidden_size)`` and advance every request's state."""
        layout = self.state.metadata(step).layout
        conv_state, ssm_state = self.state.read(step)
        u, gate = self.in_proj(x).chunk(2, dim=-1)
        u, conv_state = self.conv(u, conv_state, layout)
        u = self.ops.each(self.activation, u)
        dt, b, c = self.x_proj(u).split(self.split_sizes, dim=-1)
        dt = self.ops.each(F.softplus, self.dt_proj(self.dt_norm(dt.contiguous())).float())
        b = self.b_norm(b.contiguous()).float()
        c = self.c_norm(c.contiguous()).float()
        u = u.float()
        one = partial(selective_step, self.ops, self.a)
        y, ssm_state = scan_by_steps(one, (u, dt, b, c), ssm_state, layout)
        self.state.write(step, conv_state, ssm_state)
        y.addcmul_(u, self.d).mul_(self.ops.each(F.silu, gate.float()))
        return self.out_proj(y.to(x.dtype))


def ssd_step(ops: LayerOps, rows: Rows, states: Tensor) -> Tensor:
    """Run one token of each request; see :func:`ssd_scan`."""
    x, a, b, c = rows
    heads_per_group = x.shape[1] // b.shape[1]
    b = b.repeat_interleave(heads_per_group, dim=1)
    c = c.repeat_interleave(heads_per_group, dim=1)
    states.mul_(torch.exp(a)[:, :, None, None]).addcmul_(x[..., None], b[:, :, None, :])
    return ops.matmul(states, c[..., None]).squeeze(-1)


def ssd_scan(rows: Rows, states: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Run all tokens of several requests: matrix form within chunks, a recurrence over chunks.

    Args:
        rows: x times its step size, ``(n, heads, head_dim)``; the logarithm of the decay, at most
            0, ``(n, heads)``; B and C, ``(n, groups, state_size)``, where groups divide heads.
        states: ``(num_reqs, heads, head_dim, state_size)`` float32 before the tokens.

    Returns:
        ``y`` ``(num_tokens, heads, head_dim)``, and the states after each request's last token.
    """
    # (chunks, heads or groups, size, ...); padding has x = 0 and a = 0 and changes nothing.
    x, a, b, c = (chunks.pad(each).transpose(1, 2) for each in rows)
    num_groups = b.shape[1]
    # (chunks, groups, heads per group, size, ...)
    x, a = (each.unflatten(1, (num_groups, -1)) for each in (x, a))
    # In float64: in float32, a strong decay would swallow the weak ones after it in the sum.
    sums = a.double().cumsum(-1)

    to_each = (sums[..., :, None] - sums[..., None, :]).float()
    weights = to_each.exp_().mul_((c @ b.transpose(-1, -2)).unsqueeze(2))
    # Mask last, so that no later token, even a NaN, affects an earlier one.
    y = weighted(weights.tril_(), x)

    to_end = torch.exp((sums[..., -1:] - sums).float())
    updates = (x * to_end[..., None]).transpose(-1, -2) @ b.unsqueeze(2)
    decays = torch.exp(sums[..., -1].float())
    updates, decays = updates.flatten(1, 2), decays.flatten(1, 2)
    order, before = chunks.order, torch.empty_like(updates)
    h = states.index_select(0, order.sequences)
    for batch in order.batches():
        items = order.items[batch]
        state = h[: len(items)]
        before.index_copy_(0, items, state)
        state.mul_(decays[items, :, None, None]).add_(updates[items])

    from_start = torch.exp(sums.float())[..., None]
    y += from_start * (c.unsqueeze(2) @ before.unflatten(1, (num_groups, -1)).transpose(-1, -2))
    y = y.flatten(1, 2).transpose(1, 2).flatten(0, 1).index_select(0, chunks.slots)
    return y, torch.empty_like(h).index_copy_(0, order.sequences, h)


def weighted(weights: Tensor, x: Tensor) -> Tensor:
    """Compute ``weights @ x`` without leaking non-finite later tokens into earlier ones as 0 * NaN.

    On CUDA they may leak, because checking would synchronise; see :func:`attend_to_seen`.
    """
    y = weights @ x
    if y.is_cuda or are_finite([y]):
        return y
    is_nonfinite = ~x.isfinite().all(-1)
    earlier = weights @ x.masked_fill(is_nonfinite[..., None], 0.0)
    is_reached = is_nonfinite.cumsum(-1) > 0
    return torch.where(is_reached[..., None], y, earlier)


class Mamba2Mixer(RecurrentMixer):
    """Mixes a request's tokens through a state of fixed size::

        x ─► in ─┬─► conv ─► act ─► x | B | C ─► scan ─► + D x ─► norm(y * silu(gate)) ─► out
                 ├─► dt ─► softplus ───────────────┘                            │
                 └─► gate ──────────────────────────────────────────────────────┘

    Arguments as for :class:`RecurrentMixer`, except the convolution and the shape.

    Attributes:
        d: weight of each head's skip connection.

    Raises:
        ValueError: also if the groups do not divide the heads, or step sizes have no limits.
    """

    def __init__(
        self,
        layer_name: str,
        config: PreTrainedConfig,
        block_size: int,
        *,
        ops: LayerOps | None = None,
        **options: Unpack[TensorOptions],
    ) -> None:
        heads, groups, size = config.mamba_n_heads, config.mamba_n_groups, config.mamba_d_state
        if config.time_step_limit is None:
            raise ValueError(
                "time_step_limit must be two numbers (0 and infinity for none), got null"
            )
        if heads % groups:
            raise ValueError(
                "the number of Mamba heads must be a multiple of its groups, "
                f"got {heads} and {groups}"
            )
        inner = heads * config.mamba_d_head
        conv_splits = (inner, groups * size, groups * size)
        in_splits = (inner, sum(conv_splits), heads)
        width, has_bias = sum(conv_splits), config.mamba_conv_bias
        conv = CausalConv(width, config.mamba_d_conv, bias=has_bias, **options)
        shape, common = (heads, config.mamba_d_head, size), (layer_name, config, block_size)
        super().__init__(*common, conv=conv, state_shape=shape, ops=ops)
        hidden, bias = config.hidden_size, config.mamba_proj_bias
        self.in_proj = Linear(hidden, {"in_proj": sum(in_splits)}, bias=bias, **options)
        self.out_proj = Linear(inner, {"out_proj": hidden}, bias=bias, **options)
        self.num_heads, self.num_groups = heads, groups
        self.norm_eps = config.rms_norm_eps
        self.min_dt, self.max_dt = config.time_step_limit
        self.conv_splits, self.in_splits = conv_splits, in_splits
        self.norm_weight = empty_parameter(inner, **options)
        options["dtype"] = torch.float32
        self.a, self.d, self.dt_bias = (empty_parameter(heads, **options) for _ in range(3))

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Yield checkpoint names under ``prefix``, each with the tensor to load it into."""
        yield from super().targets(prefix)
        yield f"{prefix}D", self.d.data
        yield f"{prefix}norm.weight", self.norm_weight.data
        yield f"{prefix}dt_bias", self.dt_bias.data

    def forward(self, x: Tensor, step: AttentionStep) -> Tensor:
        """Mix ``(num_tokens, hidden_size)`` and advance every request's state."""
        layout = self.state.metadata(step).layout
        conv_state, ssm_state = self.state.read(step)
        gate, convolved, dt = self.in_proj(x).split(self.in_splits, dim=-1)
        convolved, conv_state = self.conv(convolved, conv_state, layout)
        convolved = self.ops.each(self.activation, convolved).float()
        u, b, c = convolved.split(self.conv_splits, dim=-1)
        u = u.unflatten(-1, (self.num_heads, -1))
        # Clamped for decodes too, unlike transformers: prompt and decode tokens must agree.
        dt = self.ops.each(F.softplus, dt.float() + self.dt_bias)
        dt = dt.clamp_(self.min_dt, self.max_dt)
        b, c = (each.unflatten(-1, (self.num_groups, -1)) for each in (b, c))
        rows = u * dt[..., None], dt * self.a, b, c
        one = partial(ssd_step, self.ops)
        y, ssm_state = step_and_scan(one, ssd_scan, rows, ssm_state, layout, self.ops)
        self.state.write(step, conv_state, ssm_state)
        y = y.addcmul_(u, self.d[:, None]).flatten(-2)
        # The norm is per group of channels, in float32.
        groups = (y * self.ops.each(F.silu, gate.float())).unflatten(-1, (self.num_groups, -1))
        normed = F.rms_norm(groups, groups.shape[-1:], None, self.norm_eps).flatten(-2)
        return self.out_proj(normed.to(gate.dtype) * self.norm_weight)
