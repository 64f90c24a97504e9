"""Mistral: Llama without biases, and in some checkpoints with a window on every layer."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from engine.models.decoders.decoder import DecoderConfig, LayerKind, decoder_family

__all__ = ["FAMILY"]


def mistral_config(config: PreTrainedConfig) -> DecoderConfig:
    """The window holds for all layers; ``layer_types`` says nothing about it."""
    plain = DecoderConfig.from_transformers(config)
    return replace(plain, layers=(LayerKind(config.sliding_window),) * len(plain.layers))


FAMILY = decoder_family("mistral", ("MistralForCausalLM", "MistralModel"), mistral_config)
