"""Building blocks shared by models: projections, norms, rotary positions, MLPs.

Imports attention, native, and the prefix cache.
"""

from engine.layers.delta_rule import DeltaRuleMixer as DeltaRuleMixer
from engine.layers.experts import ExpertsConfig as ExpertsConfig
from engine.layers.experts import SparseMoE as SparseMoE
from engine.layers.layer_ops import HeadNorm as HeadNorm
from engine.layers.layer_ops import LayerNorm as LayerNorm
from engine.layers.layer_ops import LayerOps as LayerOps
from engine.layers.layer_ops import MultiAxisRotaryEmbedding as MultiAxisRotaryEmbedding
from engine.layers.layer_ops import NativeLayerOps as NativeLayerOps
from engine.layers.layer_ops import RMSNorm as RMSNorm
from engine.layers.layer_ops import RotaryEmbedding as RotaryEmbedding
from engine.layers.layer_ops import TensorOptions as TensorOptions
from engine.layers.layer_ops import apply_rotary as apply_rotary
from engine.layers.layer_ops import can_pack as can_pack
from engine.layers.layer_ops import empty_parameter as empty_parameter
from engine.layers.layer_ops import rope_frequencies as rope_frequencies
from engine.layers.linear import GATED_NAMES as GATED_NAMES
from engine.layers.linear import MLP as MLP
from engine.layers.linear import Linear as Linear
from engine.layers.mamba import Mamba2Mixer as Mamba2Mixer
from engine.layers.mamba import MambaMixer as MambaMixer
from engine.layers.mamba import RecurrentMixer as RecurrentMixer
from engine.layers.shards import COLUMNS as COLUMNS
from engine.layers.shards import ROWS as ROWS
from engine.layers.shards import WHOLE as WHOLE
from engine.layers.shards import ShardError as ShardError
from engine.layers.shards import Shards as Shards
