"""Llama: the plain decoder, with optional biases."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from engine.models.decoders.decoder import DecoderConfig, decoder_family

__all__ = ["FAMILY"]


def llama_config(config: PreTrainedConfig) -> DecoderConfig:
    """``attention_bias`` covers all four projections of the attention."""
    return replace(
        DecoderConfig.from_transformers(config),
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )


FAMILY = decoder_family("llama", ("LlamaForCausalLM", "LlamaModel"), llama_config)
