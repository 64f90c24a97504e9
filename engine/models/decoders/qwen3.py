"""Qwen3: normalised heads of Q and K, and a head size of its own."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from engine.models.decoders.decoder import DecoderConfig, decoder_family, layer_kinds

__all__ = ["FAMILY"]


def qwen3_config(config: PreTrainedConfig) -> DecoderConfig:
    """``attention_bias`` covers all four projections of the attention."""
    return replace(
        DecoderConfig.from_transformers(config),
        layers=layer_kinds(config),
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        qk_norm=True,
    )


FAMILY = decoder_family("qwen3", ("Qwen3ForCausalLM", "Qwen3Model"), qwen3_config)
