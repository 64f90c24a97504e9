"""How a layer's products become scores."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Scoring"]


@dataclass(frozen=True, slots=True)
class Scoring:
    """What a layer does to the products of its queries and keys before the softmax.

    Attributes:
        scale: factor on the products.
        softcap: scores become ``softcap * tanh(score / softcap)``; None leaves them.
        bias: ``(num_heads, distances)`` float32, added to scores last, by how far behind its query
            a key lies; causal attention only. See :mod:`engine.attention.distance_bias`.
    """

    scale: float
    softcap: float | None = None
    bias: Tensor | None = None

    @property
    def only_scales(self) -> bool:
        """Whether there is neither a soft cap nor a bias."""
        return self.softcap is None and self.bias is None
