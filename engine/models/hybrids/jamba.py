"""Jamba: Mamba-1 layers, attention without positions among them, experts in some of the MLPs.

Source: Lieber et al., "Jamba: A Hybrid Transformer-Mamba Language Model", 2024.
"""

from __future__ import annotations

from transformers import PreTrainedConfig

from engine.checkpoints.checkpoint import Checkpoint
from engine.layers import ExpertsConfig, MambaConfig, MambaMixer
from engine.models.base import ModelSettings
from engine.models.decoders.decoder import DecoderConfig, SelfAttention, build_mlp
from engine.models.family import ModelFamily, has_head
from engine.models.hybrids.hybrid import HybridLayer, HybridModel

__all__ = ["FAMILY"]


def build_jamba(checkpoint: Checkpoint, settings: ModelSettings) -> HybridModel:
    """Build a Jamba, its weights not yet loaded; see :data:`Builder`."""
    config = checkpoint.config
    decoder = DecoderConfig.from_transformers(config)
    layers = []
    kinds = zip(config.layer_types, config.layers_num_experts, strict=True)
    for index, (layer_type, num_experts) in enumerate(kinds):
        mixer = (
            SelfAttention(index, decoder, settings)
            if layer_type == "full_attention"
            else _mamba(index, config, settings)
        )
        # One expert is a plain MLP, without a router.
        experts = None
        if num_experts > 1:
            experts = ExpertsConfig(
                num_experts,
                config.num_experts_per_tok,
                config.intermediate_size,
                router="router",
            )
        feed_forward = build_mlp(decoder, settings, experts)
        layers.append(HybridLayer(mixer, feed_forward, decoder, settings))
    headed, kernel_size = has_head(checkpoint), config.mamba_d_conv
    return HybridModel(decoder, layers, None, settings, kernel_size=kernel_size, has_head=headed)


def _mamba(index: int, config: PreTrainedConfig, settings: ModelSettings) -> MambaMixer:
    mamba = MambaConfig(
        hidden_size=config.hidden_size,
        inner_size=config.mamba_expand * config.hidden_size,
        state_size=config.mamba_d_state,
        dt_rank=config.mamba_dt_rank,
        kernel_size=config.mamba_d_conv,
        activation=config.hidden_act,
        norm_eps=config.rms_norm_eps,
        conv_bias=config.mamba_conv_bias,
        projection_bias=config.mamba_proj_bias,
    )
    return MambaMixer(
        f"layers.{index}.mamba",
        mamba,
        settings.block_size,
        ops=settings.ops,
        **settings.tensor_options,
    )


FAMILY = ModelFamily("jamba", ("JambaForCausalLM", "JambaModel"), build=build_jamba)
