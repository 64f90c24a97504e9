"""Jamba: Mamba-1 layers, attention without positions among them, experts in some of the MLPs.

Source: Lieber et al., "Jamba: A Hybrid Transformer-Mamba Language Model", 2024.
"""

from __future__ import annotations

from transformers import PreTrainedConfig

from engine.checkpoints.checkpoint import Checkpoint
from engine.layers import GatedMLP, MambaConfig, MambaMixer, SparseMoE
from engine.models.family import ModelFamily, has_head
from engine.models.hybrids.hybrid import HybridModel
from engine.models.hybrids.hybrid_layer import HybridLayer, SelfAttention
from engine.models.model_settings import ModelSettings

__all__ = ["FAMILY", "build_jamba"]


def build_jamba(checkpoint: Checkpoint, settings: ModelSettings) -> HybridModel:
    """Build a Jamba, its weights not yet loaded.

    Raises:
        ValueError: something that the config asks for does not fit or is not supported.
    """
    config = checkpoint.config
    layers = [
        HybridLayer(
            _mixer(index, layer_type, config, settings),
            _feed_forward(num_experts, config, settings),
            config,
            settings,
        )
        for index, (layer_type, num_experts) in enumerate(
            zip(config.layer_types, config.layers_num_experts, strict=True)
        )
    ]
    return HybridModel(config, layers, None, settings, has_head=has_head(checkpoint))


def _mixer(
    index: int, layer_type: str, config: PreTrainedConfig, settings: ModelSettings
) -> SelfAttention | MambaMixer:
    if layer_type == "full_attention":
        return SelfAttention(f"layers.{index}.self_attn", config, settings)
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


def _feed_forward(
    num_experts: int, config: PreTrainedConfig, settings: ModelSettings
) -> GatedMLP | SparseMoE:
    """One expert is a plain MLP, without a router."""
    if num_experts == 1:
        return GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            ops=settings.ops,
            **settings.tensor_options,
        )
    return SparseMoE(
        config.hidden_size,
        config.intermediate_size,
        num_experts=num_experts,
        num_experts_per_token=config.num_experts_per_tok,
        activation=config.hidden_act,
        ops=settings.ops,
        **settings.tensor_options,
    )


FAMILY = ModelFamily("jamba", ("JambaForCausalLM", "JambaModel"), build=build_jamba)
