"""Norms: of rows, with the residual addition before them, and of each head of Q and K."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.layer_ops import LayerOps

__all__ = ["HeadNorm", "LayerNorm", "RMSNorm"]


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight``, computed in float32 whatever the type of x.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

    Args:
        offset: added to the loaded weight. Where checkpoints store ``weight - 1``, that is finer
            than the type can state ``weight``: the sum is kept in float32.
        dtype: of the weight, if the offset is 0.
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


class LayerNorm(nn.Module):
    """``(x - mean) / sqrt(variance + eps) * weight + bias``.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.
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


class HeadNorm(nn.Module):
    """RMS norm of each head of Q and K, with one weight for Q's heads and one for K's.

    Args:
        num_query_heads: heads of Q, which come first.
        offset: added to the loaded weights; see :class:`RMSNorm`.
        dtype: of the weight, if the offset is 0; otherwise it is float32.
    """

    def __init__(
        self,
        num_query_heads: int,
        num_key_heads: int,
        head_dim: int,
        eps: float,
        *,
        offset: float = 0.0,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        dtype = torch.float32 if offset else dtype
        # A row per head, so that Q and K are scaled by one product.
        weight = torch.empty(num_query_heads + num_key_heads, head_dim, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.num_query_heads = num_query_heads
        self.eps = eps
        self.offset = offset

    def targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """The first row of each kind; :meth:`finish_loading` copies it to the others."""
        yield f"{prefix}q_norm.weight", self.weight.data[0]
        yield f"{prefix}k_norm.weight", self.weight.data[self.num_query_heads]

    def finish_loading(self) -> None:
        """Repeat the loaded weights over the heads and add the offset; call once."""
        query, key = self.weight.data.tensor_split((self.num_query_heads,))
        query.copy_(query[0].clone().expand_as(query))
        key.copy_(key[0].clone().expand_as(key))
        self.weight.data.add_(self.offset)

    def forward(self, heads: Tensor) -> Tensor:
        """Normalise ``(num_tokens, query heads + key heads, head_dim)``."""
        normed = F.rms_norm(heads.float(), heads.shape[-1:], None, self.eps)
        return normed.to(self.weight.dtype).mul_(self.weight).to(heads.dtype)
