"""How a model is to be held and run, whatever its family."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

import torch

from engine.layers import LayerOps

__all__ = ["ModelSettings", "TensorOptions"]


class TensorOptions(TypedDict):
    """What every weight of a model has in common."""

    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """How a model is to be held in memory, and for how long sequences.

    Attributes:
        dtype: of weights, activations and the KV cache.
        device: of the same.
        block_size: tokens per block of the KV cache.
        max_model_len: longest sequence that will run, in tokens.
        ops: what computes norms, gates and rotations.
        pack_weights: whether to hold weights in the CPU library's own layout, which is faster for
            batches and the same up to rounding; None: where that is possible.
    """

    dtype: torch.dtype
    device: torch.device
    block_size: int
    max_model_len: int
    ops: LayerOps = field(default_factory=LayerOps)
    pack_weights: bool | None = None

    @property
    def tensor_options(self) -> TensorOptions:
        """As layers and ``torch.empty`` take them."""
        return {"dtype": self.dtype, "device": self.device}
