"""Building blocks that models share: projections, norms, rotary positions, MLPs."""

from __future__ import annotations

from engine.layers.layer_ops import LayerOps, NativeLayerOps
from engine.layers.linear import Linear, can_pack
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.rotary import RotaryEmbedding, apply_rotary, rope_frequencies

__all__ = [
    "GatedMLP",
    "LayerOps",
    "Linear",
    "NativeLayerOps",
    "RMSNorm",
    "RotaryEmbedding",
    "apply_rotary",
    "can_pack",
    "rope_frequencies",
]
