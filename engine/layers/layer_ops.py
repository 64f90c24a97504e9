"""The operations between matrix products: in torch on any device, in C kernels on a CPU.

Rotary position embeddings (Su et al., "RoFormer", 2021) support every variant that a config can
request: frequencies come from transformers' ``ROPE_INIT_FUNCTIONS``. Two variants choose their
frequencies by the length of the sequence: ``dynamic`` beyond the trained length, and ``longrope``
on either side of it. transformers decides again in every forward pass, so that keys cached early
and keys cached late disagree. Here the choice is made once, for ``max_model_len``: a key then
depends only on its token and position, which prefix caching needs. Up to the trained length both
agree with transformers; set ``max_model_len`` accordingly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.checkpoints.quantized_weight import QuantizedWeight
from engine.native import NativeKernels, PackedCodes

# Rows of the cosine and sine table computed at once, which bounds the memory for intermediates.
_ROWS_AT_ONCE = 2**14
_MAX_CHANNELS = 2**16
# Multiple of the vector widths of the C kernels' products and of torch's vector loops.
_VECTOR_SIZE = 32
# Fewer numbers than torch splits among threads.
_NUMBERS_AT_ONCE = 2**14
# Quantized weights that the torch fallback dequantizes at once.
_WEIGHTS_AT_ONCE = 2**22


class TensorOptions(TypedDict):
    """Options shared by all weights of a layer."""

    dtype: torch.dtype
    device: torch.device


def empty_parameter(*shape: int, **options: Unpack[TensorOptions]) -> nn.Parameter:
    """Allocate a weight that will be loaded and not trained."""
    return nn.Parameter(torch.empty(shape, **options), requires_grad=False)


def rope_frequencies(
    config: PreTrainedConfig, max_model_len: int, layer_type: str | None = None
) -> tuple[Tensor, float]:
    """Compute the inverse frequencies that a config specifies.

    Args:
        config: a transformers config, of which ``rope_parameters`` is read.
        max_model_len: longest sequence that will run; see the module docstring.
        layer_type: key of the parameters to read, in configs with several sets.

    Returns:
        ``(rotary_dim / 2,)`` float32 inverse frequencies, and the factor on cosine and sine.

    Raises:
        ValueError: the config has no rope parameters, names an unknown variant, or lacks a
            parameter of its variant or has an invalid one.
    """
    parameters = getattr(config, "rope_parameters", None)
    if parameters and layer_type is not None:
        parameters = parameters.get(layer_type)
    if not parameters:
        of_layers = "" if layer_type is None else f" of {layer_type!r} layers"
        raise ValueError(f"{type(config).__name__} has no rope_parameters{of_layers}")
    rope_type = parameters.get("rope_type", "default")
    if not isinstance(rope_type, str):
        raise ValueError(f"rope_type must be a name, got {rope_type!r}")
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or int(config.hidden_size // config.num_attention_heads)
    if not 1 <= head_dim <= _MAX_CHANNELS:
        raise ValueError(
            f"head_dim, or hidden_size by num_attention_heads, must be 1 to {_MAX_CHANNELS}, "
            f"got {head_dim}"
        )
    if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
        raise ValueError(f"unknown rope_type {rope_type!r}; known are {known}")
    share = parameters.get("partial_rotary_factor", 1.0)
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise ValueError(f"partial_rotary_factor must be above 0 and at most 1, got {share!r}")
    try:
        if rope_type == "default":
            rotary_dim = int(head_dim * share)
            exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
            inv_freq, scaling = 1.0 / (parameters["rope_theta"] ** exponents), 1.0
        else:
            # Only dynamic and longrope use seq_len.
            inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](
                config, torch.device("cpu"), seq_len=max_model_len, layer_type=layer_type
            )
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"rope_parameters {parameters} cannot be used: {type(error).__name__}: {error}"
        ) from error
    if not (inv_freq.isfinite().all() and math.isfinite(scaling) and len(inv_freq)):
        raise ValueError(f"rope_parameters {parameters} give no finite frequencies")
    return inv_freq, scaling


class RotaryEmbedding(nn.Module):
    """Cosines and sines of all positions, precomputed from ``(rotary_dim / 2,)`` frequencies."""

    def __init__(
        self, inv_freq: Tensor, scaling: float, max_model_len: int, **options: Unpack[TensorOptions]
    ) -> None:
        super().__init__()
        # (max_model_len, rotary_dim): half cosines, half sines, so that one gather serves a step.
        table = torch.empty(max_model_len, 2 * len(inv_freq), **options)
        for rows in () if table.is_meta else table.split(_ROWS_AT_ONCE):
            start = rows.storage_offset() // table.stride(0)
            positions = torch.arange(start, start + len(rows), dtype=torch.float32)
            angles = torch.outer(positions, inv_freq)
            rows.copy_(torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(scaling))
        self.table = nn.Buffer(table, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the inputs of :func:`apply_rotary` at ``(num_tokens,)`` positions, once a step.

        Returns:
            Cosines ``(num_tokens, 1, rotary_dim)`` and sines of the same shape, whose first half
            is negated, so that the rotation is ``x cos + swap(x) sin``.
        """
        cos, sin = self.gather(positions).unsqueeze(1).chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def gather(self, positions: Tensor) -> Tensor:
        """Gather rows ``(num_tokens, rotary_dim)`` of the table."""
        return self.table.index_select(0, positions)


class MultiAxisRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding with several position axes, each of which rotates separate channels.

    ::

        channels   | time | height | width | time | height | width |
                   |<- half of cosines --->|<- half of sines ----->|

    If interleaved, each axis has frequencies of all sizes: height and width use every third one, up
    to their section sizes, and time uses the rest. A token with equal positions on all axes is
    rotated as by :class:`RotaryEmbedding`. Source: Wang et al., arXiv:2409.12191, section 2.1.

    Args:
        inv_freq: ``(rotary_dim / 2,)`` inverse frequencies.
        max_model_len: number of positions on each axis.
        sections: number of frequencies of each axis, cycling through the axes if there are more.
        interleaved: if true, axes alternate at every frequency.

    Raises:
        ValueError: the sections do not sum to the number of frequencies.
    """

    num_axes = 3

    def __init__(
        self,
        inv_freq: Tensor,
        scaling: float,
        max_model_len: int,
        *,
        sections: Sequence[int],
        interleaved: bool = False,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__(inv_freq, scaling, max_model_len, **options)
        if not isinstance(sections, list | tuple) or not all(type(n) is int for n in sections):
            raise ValueError(f"mrope_section must be a list of integers, got {sections!r}")
        if sum(sections) != len(inv_freq):
            raise ValueError(
                f"mrope_section {list(sections)} must add up to {len(inv_freq)} frequencies"
            )
        if interleaved:
            index = torch.arange(len(inv_freq))
            axis = index % self.num_axes
            axes = torch.where(index < torch.tensor(sections)[axis] * self.num_axes, axis, 0)
        else:
            axes = torch.arange(len(sections)) % self.num_axes
            axes = axes.repeat_interleave(torch.tensor(sections))
        of_channel = axes.repeat(2)
        self.axis_of_channel = nn.Buffer(of_channel.to(options["device"]), persistent=False)

    def gather(self, positions: Tensor) -> Tensor:
        """Gather rows at ``(3, num_tokens)`` positions, or ``(num_tokens,)`` for text."""
        if positions.ndim == 1:
            return super().gather(positions)
        of_channel = positions.T.index_select(1, self.axis_of_channel)
        return self.table.gather(0, of_channel)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads in place, and return them.

    Args:
        x: ``(num_tokens, num_heads, head_dim)``; may be a view. Channels past ``rotary_dim`` are
            unchanged.
        cos: as returned by :class:`RotaryEmbedding`.
    """
    rotary_dim = cos.shape[-1]
    rotated = x if x.shape[-1] == rotary_dim else x[..., :rotary_dim]
    swapped = rotated.roll(rotary_dim // 2, -1)
    rotated.mul_(cos).addcmul_(swapped, sin)
    return x


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if :meth:`Linear.pack` is possible and worthwhile for weights of this kind.

    Plain products of 4 to 64 rows (the decode of a batch) reach a fraction of the memory bound
    on CPUs; a packed layout makes them 1.5 to 2 times faster. It replaces the plain matrix, since
    a second copy of every weight would cost more than it gains.
    """
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()


class PackedWeight(NamedTuple):
    """A weight ``(out_features, in_features)`` in another layout.

    Attributes:
        multiply: maps ``(rows, in_features)`` and a bias or None to ``x W^T + b``, equal to the
            plain product except for rounding.
        multiply_groups: computes all products of several :attr:`panels`, given the rows and the
            number of rows for each; None if that is not faster than one by one.
        panels: the weight in the form that ``multiply_groups`` accepts.
    """

    multiply: Callable[[Tensor, Tensor | None], Tensor]
    nbytes: int
    out_features: int
    multiply_groups: Callable[[Sequence[Tensor], Tensor, Sequence[int]], Tensor] | None = None
    panels: Tensor | None = None


class LayerOps:
    """Operations in torch, for any device and type.

    Attributes:
        deterministic: True if a row's result is bit-identical whatever other rows there are.
        has_tiles: True if products in bfloat16 use a processor's tiles (AMX).
    """

    deterministic = False
    has_tiles = False

    def pack_weight(self, weight: Tensor) -> PackedWeight:
        """Pack a weight ``(out, in)``; float32 on a CPU gets oneDNN's layout for decode steps."""
        if not can_pack(weight.device, weight.dtype):
            nbytes, rows = weight.nbytes, len(weight)
            return PackedWeight(lambda x, bias: F.linear(x, weight, bias), nbytes, rows)
        # Without a row count, the layout suits any number of rows.
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        # The overload itself, to avoid resolving it at every call.
        linear = torch.ops.mkldnn._linear_pointwise.default

        def multiply(x: Tensor, bias: Tensor | None) -> Tensor:
            return linear(x, packed, bias, "none", [], "")

        return PackedWeight(multiply, weight.nbytes, len(weight))

    def pack_quantized(self, weight: QuantizedWeight) -> PackedWeight:
        """Pack a quantized weight, which is dequantized a few rows at a time to be multiplied."""
        layout, bits, width = weight.layout, weight.bits, weight.shape[1]
        codes, scales, offsets = weight.codes, weight.scales, weight.offsets
        if bits == 4:
            codes = F.pad(codes, (0, width % 2))
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        step = max(_WEIGHTS_AT_ONCE // width, 1)

        def multiply(x: Tensor, bias: Tensor | None) -> Tensor:
            parts = []
            pieces = (codes.split(step), scales.split(step), offsets.split(step))
            for piece, scale, offset in zip(*pieces, strict=True):
                if bits == 4:
                    piece = torch.stack((piece & 15, piece >> 4), dim=-1).flatten(1)[:, :width]
                plain = QuantizedWeight(piece, scale, offset, *layout).dequantize(x.dtype)
                parts.append(F.linear(x, plain))
            output = torch.cat(parts, dim=-1)
            return output if bias is None else output.add_(bias)

        nbytes = codes.nbytes + scales.nbytes + offsets.nbytes
        return PackedWeight(multiply, nbytes, len(codes))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute ``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in float32."""
        if x.dtype == torch.float32:
            # On a CPU, F.rms_norm runs more and larger operations.
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            scale = norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
            return (x * scale).mul_(weight)
        # As in transformers: rounded to x's type before the weight, or after if that is float32.
        normed = F.rms_norm(x.float(), weight.shape, None, eps).to(weight.dtype)
        return normed.mul_(weight).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add ``x`` to ``residual`` in place, and return the normalised sum."""
        return self.rms_norm(residual.add_(x), weight, eps)

    def gate(self, gate_up: Tensor, activation: nn.Module) -> Tensor:
        """Compute ``activation(gate) * up`` of ``(rows, 2 * width)``: gates first, then ups."""
        gate, up = gate_up.chunk(2, dim=-1)
        return self.each(activation, gate).mul_(up)

    def each(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Apply an elementwise ``function`` to ``x`` ``(rows, width)``."""
        return function(x)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute ``a @ b`` for a batch of small float32 matrices."""
        return a @ b

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate heads in place; see :func:`engine.layers.apply_rotary`."""
        apply_rotary(heads, cos, sin)


class NativeLayerOps(LayerOps):
    """Operations in C for float32 on a CPU: each is one pass over its rows, split among threads.

    Rows may be strided, as with :class:`LayerOps`; the kernels then get a contiguous copy.

    Args:
        deterministic: if true, a row's result is bit-identical whatever other rows there are;
            operations that cannot guarantee this raise ValueError.
    """

    def __init__(self, kernels: NativeKernels, *, deterministic: bool = False) -> None:
        self._kernels = kernels
        self.deterministic = deterministic
        # Sums in tiles depend on the number of rows.
        self.has_tiles = kernels.has_tiles and not deterministic

    def pack_weight(self, weight: Tensor) -> PackedWeight:
        """See :class:`LayerOps`; widths that the kernel does not support use oneDNN."""
        if weight.dtype == torch.bfloat16:
            return self._pack_codes(self._kernels.pack_bfloat16(weight))
        packed = None if weight.is_meta else self._kernels.pack_linear(weight)
        if packed is None and self.deterministic and not weight.is_meta:
            return self._pack_padded(weight)
        if packed is None:
            return super().pack_weight(weight)
        multiply, groups = partial(self._kernels.linear, packed), self._kernels.linear_groups
        return PackedWeight(multiply, packed.nbytes, len(weight), groups, packed)

    def pack_quantized(self, weight: QuantizedWeight) -> PackedWeight:
        """See :class:`LayerOps`; group sizes that the kernel does not support use torch."""
        packed = self._kernels.pack_quantized(
            weight.codes, weight.scales, weight.offsets, weight.group_size, weight.bits
        )
        if packed is not None:
            return self._pack_codes(packed)
        if self.deterministic:
            raise ValueError(
                f"deterministic: no C kernel multiplies weights of {weight.bits} bits in groups of "
                f"{weight.group_size}; leave deterministic out, or dequantize the checkpoint"
            )
        return super().pack_quantized(weight)

    def _pack_padded(self, weight: Tensor) -> PackedWeight:
        """Pack a weight padded with zero outputs to a number that the kernel supports."""
        rows = len(weight)
        packed = self._kernels.pack_linear(F.pad(weight, (0, 0, 0, -rows % _VECTOR_SIZE)))
        assert packed is not None

        def multiply(x: Tensor, bias: Tensor | None) -> Tensor:
            output = self._kernels.linear(packed, x, None)[:, :rows]
            return output.contiguous() if bias is None else output + bias

        return PackedWeight(multiply, packed.nbytes, rows)

    def each(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """See :class:`LayerOps`. torch's vector and scalar code round differently.

        Pieces of whole vectors that fit one thread use only the vector code.
        """
        if not self.deterministic:
            return function(x)
        flat = F.pad(x.flatten(), (0, -x.numel() % _VECTOR_SIZE))
        output = torch.cat([function(piece) for piece in flat.split(_NUMBERS_AT_ONCE)])
        return output[: x.numel()].view(x.shape)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """See :class:`LayerOps`; library products round depending on the batch size.

        A sum over rows is used instead. Columns are padded to whole vectors, because the rest
        would be rounded in another order when threads share them.
        """
        if not self.deterministic:
            return a @ b
        width = b.shape[-1]
        if width > 1:
            b = F.pad(b, (0, -width % _VECTOR_SIZE))
        return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)[..., :width]

    def _pack_codes(self, packed: PackedCodes) -> PackedWeight:
        nbytes = packed.codes.nbytes + packed.factors.nbytes
        multiply = partial(self._kernels.quantized, packed, in_tiles=self.has_tiles)
        return PackedWeight(multiply, nbytes, packed.shape[0])

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See :class:`LayerOps`."""
        return self._kernels.rms_norm(x.contiguous(), weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See :class:`LayerOps`."""
        return self._kernels.rms_norm(residual, weight, eps, x.contiguous())

    def gate(self, gate_up: Tensor, activation: nn.Module) -> Tensor:
        """See :class:`LayerOps`; activations other than SiLU use torch."""
        if isinstance(activation, nn.SiLU):
            return self._kernels.gated_silu(gate_up.contiguous())
        return super().gate(gate_up, activation)

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """See :class:`LayerOps`."""
        self._kernels.rotate(heads, cos, sin)


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight``, computed in float32 whatever the type of x.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

    Args:
        offset: added to the loaded weight, for checkpoints that store ``weight - 1``. The sum is
            kept in float32, because the checkpoint's type cannot represent ``weight`` as finely.
        dtype: of the weight, if the offset is 0.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        *,
        offset: float = 0.0,
        ops: LayerOps | None = None,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        if offset:
            options["dtype"] = torch.float32
        self.weight = empty_parameter(hidden_size, **options)
        self.eps = eps
        self.offset = offset
        self.ops = ops or LayerOps()

    def finish_loading(self) -> None:
        """Add the offset to the loaded weight; call once."""
        self.weight.data.add_(self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``(..., hidden_size)``."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add ``x`` to ``residual`` in place, and return the normalised sum."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Yield checkpoint names under ``prefix``, each with the tensor to load it into."""
        for name, parameter in self.named_parameters():
            yield f"{prefix}{name}", parameter.data


class LayerNorm(RMSNorm):
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``; arguments as for :class:`RMSNorm`.

    Source: Ba et al., "Layer Normalization", 2016.
    """

    def __init__(self, hidden_size: int, eps: float, **options: Any) -> None:
        super().__init__(hidden_size, eps, **options)
        self.bias = nn.Parameter(torch.empty_like(self.weight), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``(..., hidden_size)``."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add ``x`` to ``residual`` in place, and return the normalised sum."""
        return self(residual.add_(x))


class HeadNorm(RMSNorm):
    """RMS norm of each head of Q and K, with one weight for Q's heads and one for K's.

    Args:
        num_query_heads: heads of Q, which come first; other arguments as for :class:`RMSNorm`.
    """

    def __init__(
        self, num_query_heads: int, num_key_heads: int, head_dim: int, eps: float, **options: Any
    ) -> None:
        super().__init__(head_dim, eps, **options)
        # One row per head, so that one product scales Q and K.
        weight = self.weight.new_empty(num_query_heads + num_key_heads, head_dim)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.num_query_heads = num_query_heads

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the first row of Q and of K; :meth:`finish_loading` copies them to the others."""
        yield f"{prefix}q_norm.weight", self.weight.data[0]
        yield f"{prefix}k_norm.weight", self.weight.data[self.num_query_heads]

    def finish_loading(self) -> None:
        """Repeat the loaded weights over the heads and add the offset; call once."""
        query, key = self.weight.data.tensor_split((self.num_query_heads,))
        query.copy_(query[0].clone().expand_as(query))
        key.copy_(key[0].clone().expand_as(key))
        super().finish_loading()

    def forward(self, heads: Tensor) -> Tensor:
        """Normalise ``(num_tokens, query heads + key heads, head_dim)``."""
        normed = F.rms_norm(heads.float(), heads.shape[-1:], None, self.eps)
        return normed.to(self.weight.dtype).mul_(self.weight).to(heads.dtype)
