"""A linear layer that fuses several checkpoint matrices and can pack its weight for the CPU."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.layer_ops import LayerOps, PackedWeight

__all__ = ["Linear", "can_pack"]


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether :meth:`Linear.pack` is possible, and worth it, for weights of this kind.

    Plain products of 4 to 64 rows (the decode of a batch) reach a fraction of the memory bound
    on CPUs; a packed layout makes them 1.5 to 2 times faster. It replaces the plain matrix, since
    a second copy of every weight would cost more than it brings.
    """
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()


class Linear(nn.Module):
    """``y = x W^T + b`` where W stacks one or several matrices of the checkpoint.

    One product for Q, K and V (or gate and up) reads the activations once::

        W  ┌ q_proj ┐   (out_features, in_features), C-contiguous: each part is a slice of rows,
           ├ k_proj ┤   so that a checkpoint tensor is copied straight to its place
           └ v_proj ┘

    Args:
        in_features: width of the input.
        parts: checkpoint name of each matrix to its number of rows, in order.
        bias: whether the parts have biases, or the names of those that have one.
        dtype: of the weight.
        device: of the weight.
        weight: use this matrix instead of a new one (a head tied to the embedding).
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool | Collection[str] = False,
        dtype: torch.dtype,
        device: torch.device,
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.parts = dict(parts)
        self.in_features = in_features
        self.out_features = sum(self.parts.values())
        if weight is None:
            values = torch.empty(self.out_features, in_features, dtype=dtype, device=device)
            weight = nn.Parameter(values, requires_grad=False)
        self.weight: nn.Parameter | None = weight
        self.biased_parts = (self.parts if bias else ()) if isinstance(bias, bool) else bias
        self.bias: nn.Parameter | None = None
        if self.biased_parts:
            # Zeros stay where a part has no bias.
            values = torch.zeros(self.out_features, dtype=dtype, device=device)
            self.bias = nn.Parameter(values, requires_grad=False)
        self._packed: PackedWeight | None = None

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names under ``prefix``, each with the slice that its tensor is copied to."""
        if self.weight is None:
            raise RuntimeError("the weight is packed already; load before packing")
        start = 0
        for part, rows in self.parts.items():
            yield f"{prefix}{part}.weight", self.weight.data[start : start + rows]
            if self.bias is not None and part in self.biased_parts:
                yield f"{prefix}{part}.bias", self.bias.data[start : start + rows]
            start += rows

    def pack(self, ops: LayerOps | None = None) -> None:
        """Replace the weight by a layout that a CPU multiplies faster; see :func:`can_pack`.

        Results differ from the plain product by rounding only.
        """
        if self.weight is None:
            return
        self._packed = (ops or LayerOps()).pack_weight(self.weight.data)
        self.weight = None

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        return sum(t.nbytes for t in (self.weight, self._packed, self.bias) if t is not None)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(rows, in_features)`` to ``(rows, out_features)``."""
        if self._packed is None:
            # weight is only None once packed
            return F.linear(x, self.weight, self.bias)  # type: ignore[arg-type]
        return self._packed.multiply(x, self.bias)
