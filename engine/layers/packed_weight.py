"""A product's weight in a layout that a CPU multiplies faster; each replaces the plain matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from engine.native import NativeKernels

__all__ = ["NativeWeight", "OneDnnWeight", "PackedWeight"]


class PackedWeight(ABC):
    """``y = x W^T + b`` in float32, the same as with the plain matrix but for rounding.

    Attributes:
        nbytes: bytes of the matrix.
    """

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
