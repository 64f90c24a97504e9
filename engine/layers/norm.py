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
        dtype: of the weight.
        device: of the weight.
        ops: what computes it.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ops: LayerOps | None = None,
    ) -> None:
        super().__init__()
        weight = torch.empty(hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps
        self.ops = ops or LayerOps()

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``(..., hidden_size)``."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add ``x`` to ``residual`` in place, and return the sum normalised."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)
