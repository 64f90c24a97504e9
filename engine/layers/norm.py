"""Root-mean-square layer norm, with the residual addition that goes before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.layers.layer_ops import LayerOps

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight``, computed in float32 whatever the type of x.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

    Args:
        hidden_size: width of the last dimension.
        eps: added to the mean square.
        offset: added to the loaded weight. Gemma's checkpoints store ``weight - 1``, which is
            finer than the type can state ``weight``: the sum is kept in float32.
        dtype: of the weight, if the offset is 0.
        device: of the weight.
        ops: what computes it.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        *,
        offset: float = 0.0,
        dtype: torch.dtype,
        device: torch.device,
        ops: LayerOps | None = None,
    ) -> None:
        super().__init__()
        dtype = torch.float32 if offset else dtype
        weight = torch.empty(hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
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
        """Add ``x`` to ``residual`` in place, and return the sum normalised."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)
