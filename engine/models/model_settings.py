"""How a model is to be held and run, whatever its family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypedDict

import torch
from transformers import PreTrainedConfig

from engine.layers import LayerOps

__all__ = ["ModelSettings", "TensorOptions"]


class TensorOptions(TypedDict):
    """What every weight of a model has in common."""

    dtype: torch.dtype
    device: torch.device


def _unknown(config: PreTrainedConfig) -> NoReturn:
    raise ValueError(f"no family of decoders is known here, not of type {config.model_type!r}")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """How a model is to be held in memory, and for how long sequences.

    Attributes:
        dtype: of weights, activations and the KV cache.
        device: of the same.
        block_size: tokens per block of the KV cache.
        max_model_len: longest sequence that will run, in tokens.
        ops: what computes norms, gates and rotations.
        decoder_config_of: from the config of a plain decoder inside another model to what reads it;
            ``ValueError`` for one that no family declares.
        pack_weights: whether to hold weights in the CPU library's own layout, which is faster for
            batches and the same up to rounding; None: where that is possible.
    """

    dtype: torch.dtype
    device: torch.device
    block_size: int
    max_model_len: int
    ops: LayerOps = field(default_factory=LayerOps)
    decoder_config_of: Callable[[PreTrainedConfig], Callable[[PreTrainedConfig], Any]] = _unknown
    pack_weights: bool | None = None

    @property
    def tensor_options(self) -> TensorOptions:
        """As layers and ``torch.empty`` take them."""
        return {"dtype": self.dtype, "device": self.device}
