"""Building blocks that models share: projections, norms, rotary positions, MLPs.

Imports attention, native, and the prefix cache.
"""

from engine.layers.layer_ops import LayerOps, NativeLayerOps
from engine.layers.linear import Linear, can_pack
from engine.layers.mamba import MambaConfig, MambaMixer
from engine.layers.mamba2 import Mamba2Config, Mamba2Mixer
from engine.layers.mlp import GatedMLP, PlainMLP, SparseMoE
from engine.layers.norm import HeadNorm, LayerNorm, RMSNorm
from engine.layers.recurrent_mixer import PackedLayout
from engine.layers.rotary import (
    MultiAxisRotaryEmbedding,
    RotaryEmbedding,
    apply_rotary,
    rope_frequencies,
)

__all__ = [
    "GatedMLP",
    "HeadNorm",
    "LayerNorm",
    "LayerOps",
    "Linear",
    "Mamba2Config",
    "Mamba2Mixer",
    "MambaConfig",
    "MambaMixer",
    "MultiAxisRotaryEmbedding",
    "NativeLayerOps",
    "PackedLayout",
    "PlainMLP",
    "RMSNorm",
    "RotaryEmbedding",
    "SparseMoE",
    "apply_rotary",
    "can_pack",
    "rope_frequencies",
]
