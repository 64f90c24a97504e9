"""RMS norm of each head of the queries and keys."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["HeadNorm"]


class HeadNorm(nn.Module):
    """RMS norm of each head of Q and K, with one weight for Q's heads and one for K's.

    Args:
        num_query_heads: heads of Q, which come first.
        num_key_heads: heads of K.
        head_dim: channels per head.
        eps: added to the mean square.
        offset: added to the loaded weights; see :class:`RMSNorm`.
        dtype: of the weight, if the offset is 0; otherwise it is float32.
        device: of the weight.
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
