"""Root-mean-square layer norm, with the residual addition that goes before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight``, computed in float32 whatever the type of x.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

    Args:
        hidden_size: width of the last dimension.
        eps: added to the mean square.
        dtype: of the weight.
        device: of the weight.
    """

    def __init__(
        self, hidden_size: int, eps: float, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        weight = torch.empty(hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps
        # A tensor, so that it can be the summand of one fused operation.
        self.register_buffer("_eps", torch.full((1,), eps, device=device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``(..., hidden_size)``."""
        if x.dtype == torch.float32:
            # On a CPU F.rms_norm is a chain of separate operations; this chain is half as long.
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            mean_square = torch.addcmul(self._eps, norm, norm, value=1 / x.shape[-1])
            return (x * mean_square.rsqrt_()).mul_(self.weight)
        # As in transformers: rounded to x's type before the weight is applied.
        normed = F.rms_norm(x.float(), self.weight.shape, None, self.eps)
        return normed.to(x.dtype).mul_(self.weight)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add ``x`` to ``residual`` in place, and return the sum normalised."""
        return self.forward(residual.add_(x))
