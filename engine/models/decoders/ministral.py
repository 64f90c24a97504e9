"""Ministral: Mistral whose ``layer_types`` say which layers slide."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from engine.models.decoders.decoder import DecoderConfig, decoder_family, layer_kinds

__all__ = ["FAMILY"]


def ministral_config(config: PreTrainedConfig) -> DecoderConfig:
    """No biases, although transformers builds it on Qwen2."""
    return replace(DecoderConfig.from_transformers(config), layers=layer_kinds(config))


FAMILY = decoder_family(
    "ministral", ("MinistralForCausalLM", "MinistralModel"), ministral_config, is_base=False
)
