"""Qwen2 and Qwen2.5: biases on Q, K and V alone; a window on the upper layers if switched on."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from engine.models.decoders.decoder import DecoderConfig, decoder_family, layer_kinds

__all__ = ["FAMILY", "qwen2_config"]


def qwen2_config(config: PreTrainedConfig) -> DecoderConfig:
    """The biases are fixed by the family, not by the config."""
    return replace(
        DecoderConfig.from_transformers(config), layers=layer_kinds(config), qkv_bias=True
    )


FAMILY = decoder_family("qwen2", ("Qwen2ForCausalLM", "Qwen2Model"), qwen2_config)
