"""Qwen3 with experts: the attention of Qwen3, and a mixture of experts in most MLPs."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from engine.layers import ExpertsConfig
from engine.models.decoders.decoder import DecoderConfig, LayerKind, decoder_family

__all__ = ["FAMILY", "qwen3_moe_config"]


def qwen3_moe_config(config: PreTrainedConfig, shared_size: int = 0) -> DecoderConfig:
    """Layers without experts are named one by one, or left between those of a step.

    Args:
        shared_size: width inside an expert that all tokens run through; 0: there is none.
    """
    plain = DecoderConfig.from_transformers(config)
    experts = None
    if config.num_experts > 0:
        experts = ExpertsConfig(
            config.num_experts,
            config.num_experts_per_tok,
            config.moe_intermediate_size,
            normalize=config.norm_topk_prob,
            shared_size=shared_size,
        )

    def kind(index: int) -> LayerKind:
        has_one = index in config.mlp_only_layers or (index + 1) % config.decoder_sparse_step
        return LayerKind(config.sliding_window, experts=None if has_one else experts)

    return replace(
        plain,
        layers=tuple(map(kind, range(len(plain.layers)))),
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        qk_norm=True,
    )


FAMILY = decoder_family("qwen3_moe", ("Qwen3MoeForCausalLM", "Qwen3MoeModel"), qwen3_moe_config)
