"""What layers compute between their products: with torch anywhere, with C kernels on a CPU."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.rotary import apply_rotary
from engine.native import NativeKernels

__all__ = ["LayerOps", "NativeLayerOps", "OneDnnWeight", "PackedWeight"]


class PackedWeight(ABC):
    """``y = x W^T + b`` in float32, the same as with the plain matrix but for rounding."""

    nbytes: int

    @abstractmethod
    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Map ``(rows, in_features)`` to ``(rows, out_features)``."""


class OneDnnWeight(PackedWeight):
    """oneDNN's own layout, for any number of rows.

    Args:
        weight: ``(out_features, in_features)``.
    """

    def __init__(self, weight: Tensor) -> None:
        # No row count is given: the layout is then good for any number of rows.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        # The overload itself: it would be looked for at every call.
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self.nbytes = weight.nbytes

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See :class:`PackedWeight`."""
        output: Tensor = self._multiply(x, self._packed, bias, "none", [], "")
        return output


class NativeWeight(PackedWeight):
    """The layout of ``engine/native/linear.c``.

    Args:
        kernels: what multiplies it.
        packed: what :meth:`NativeKernels.pack_linear` made.
    """

    def __init__(self, kernels: NativeKernels, packed: Tensor) -> None:
        self._kernels = kernels
        self._packed = packed
        self.nbytes = packed.nbytes

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See :class:`PackedWeight`."""
        return self._kernels.linear(x, self._packed, bias)


class LayerOps:
    """Any device and type, with torch."""

    def pack_weight(self, weight: Tensor) -> PackedWeight:
        """A float32 weight ``(out, in)`` on a CPU, laid out for the products of decode steps."""
        return OneDnnWeight(weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in float32."""
        if x.dtype == torch.float32:
            # On a CPU F.rms_norm is a chain of more, and larger, operations.
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            scale = norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
            output: Tensor = (x * scale).mul_(weight)
            return output
        # As in transformers: rounded to x's type before the weight, or after a float32 one.
        normed = F.rms_norm(x.float(), weight.shape, None, eps).to(weight.dtype)
        return normed.mul_(weight).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add ``x`` to ``residual`` in place, and return the sum normalised."""
        return self.rms_norm(residual.add_(x), weight, eps)

    def gate(self, gate_up: Tensor, activation: nn.Module) -> Tensor:
        """``activation(gate) * up`` of ``(rows, 2 * width)``: gates first, then ups."""
        gate, up = gate_up.chunk(2, dim=-1)
        output: Tensor = activation(gate).mul_(up)
        return output

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate heads in place; see :func:`engine.layers.apply_rotary`."""
        apply_rotary(heads, cos, sin)


class NativeLayerOps(LayerOps):
    """float32 on a CPU: each operation is one pass over its rows, shared by all threads.

    Rows may be a stride apart, as with :class:`LayerOps`; the kernels get a copy of such.
    """

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels

    def pack_weight(self, weight: Tensor) -> PackedWeight:
        """See :class:`LayerOps`; widths that the kernel does not take go to oneDNN."""
        packed = self._kernels.pack_linear(weight)
        return (
            super().pack_weight(weight) if packed is None else NativeWeight(self._kernels, packed)
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See :class:`LayerOps`."""
        return self._kernels.rms_norm(x.contiguous(), weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See :class:`LayerOps`."""
        return self._kernels.add_rms_norm(x.contiguous(), residual, weight, eps)

    def gate(self, gate_up: Tensor, activation: nn.Module) -> Tensor:
        """See :class:`LayerOps`; activations other than SiLU take torch's way."""
        if isinstance(activation, nn.SiLU):
            return self._kernels.gated_silu(gate_up.contiguous())
        return super().gate(gate_up, activation)

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """See :class:`LayerOps`."""
        self._kernels.rotate(heads, cos, sin)
