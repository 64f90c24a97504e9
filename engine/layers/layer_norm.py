"""Layer norm with weight and bias."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["LayerNorm"]


class LayerNorm(nn.Module):
    """``(x - mean) / sqrt(variance + eps) * weight + bias``.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.

    Args:
        hidden_size: width of the last dimension.
        eps: added to the variance.
        dtype: of weight and bias.
        device: of the same.
    """

    def __init__(
        self, hidden_size: int, eps: float, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        weight, bias = torch.empty(2, hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(bias, requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``(..., hidden_size)``."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
