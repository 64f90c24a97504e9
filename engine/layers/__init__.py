"""Building blocks that models share: projections, norms, rotary positions, MLPs.

Imports attention, native, and the prefix cache.
"""

from engine.layers.delta_rule import DeltaRuleMixer
from engine.layers.experts import ExpertsConfig, SparseMoE
from engine.layers.layer_ops import (
    HeadNorm,
    LayerOps,
    MultiAxisRotaryEmbedding,
    NativeLayerOps,
    RMSNorm,
    RotaryEmbedding,
    apply_rotary,
    can_pack,
    rope_frequencies,
)
from engine.layers.linear import GatedMLP, Linear, PlainMLP
from engine.layers.mamba import Mamba2Mixer, MambaMixer

__all__ = [
    "DeltaRuleMixer",
    "ExpertsConfig",
    "GatedMLP",
    "HeadNorm",
    "LayerOps",
    "Linear",
    "Mamba2Mixer",
    "MambaMixer",
    "MultiAxisRotaryEmbedding",
    "NativeLayerOps",
    "PlainMLP",
    "RMSNorm",
    "RotaryEmbedding",
    "SparseMoE",
    "apply_rotary",
    "can_pack",
    "rope_frequencies",
]
