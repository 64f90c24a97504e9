"""Bamba: Mamba-2 layers, and attention layers that rotate half of each head's channels.

Source: IBM, Princeton, CMU and UIUC, "Bamba: Inference-Efficient Hybrid Mamba2 Model", 2024.
"""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from engine.checkpoints.checkpoint import Checkpoint
from engine.layers import Mamba2Config, Mamba2Mixer
from engine.models.base import ModelSettings
from engine.models.decoders.decoder import DecoderConfig, SelfAttention, build_mlp, build_rotary
from engine.models.family import ModelFamily, has_head
from engine.models.hybrids.hybrid import HybridLayer, HybridModel

__all__ = ["FAMILY"]


def build_bamba(checkpoint: Checkpoint, settings: ModelSettings) -> HybridModel:
    """Build a Bamba, its weights not yet loaded; see :data:`Builder`."""
    config = checkpoint.config
    decoder = replace(
        DecoderConfig.from_transformers(config),
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )
    layers = []
    for index, layer_type in enumerate(config.layer_types):
        mixer = (
            SelfAttention(index, decoder, settings)
            if layer_type == "full_attention"
            else _mamba(index, config, settings)
        )
        layers.append(HybridLayer(mixer, build_mlp(decoder, settings), decoder, settings))
    rotary = build_rotary(config, settings)
    headed, kernel_size = has_head(checkpoint), config.mamba_d_conv
    return HybridModel(decoder, layers, rotary, settings, kernel_size=kernel_size, has_head=headed)


def _mamba(index: int, config: PreTrainedConfig, settings: ModelSettings) -> Mamba2Mixer:
    if config.time_step_limit is None:
        raise ValueError("time_step_limit must be two numbers (0 and infinity for none), got null")
    least, greatest = config.time_step_limit
    mamba = Mamba2Config(
        hidden_size=config.hidden_size,
        num_heads=config.mamba_n_heads,
        head_dim=config.mamba_d_head,
        num_groups=config.mamba_n_groups,
        state_size=config.mamba_d_state,
        kernel_size=config.mamba_d_conv,
        activation=config.hidden_act,
        norm_eps=config.rms_norm_eps,
        conv_bias=config.mamba_conv_bias,
        projection_bias=config.mamba_proj_bias,
        dt_limit=(least, greatest),
    )
    return Mamba2Mixer(
        f"layers.{index}.mamba", mamba, settings.block_size, **settings.tensor_options
    )


FAMILY = ModelFamily("bamba", ("BambaForCausalLM", "BambaModel"), build=build_bamba)
