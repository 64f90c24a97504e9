"""Mistral: Llama without biases, and in some checkpoints with a window on every layer."""

from __future__ import annotations

from transformers import PreTrainedConfig

from engine.models.decoder_config import DecoderConfig

__all__ = ["mistral_config"]


def mistral_config(config: PreTrainedConfig) -> DecoderConfig:
    """The window holds for all layers; ``layer_types`` says nothing about it."""
    return DecoderConfig.from_transformers(config, sliding_window=config.sliding_window)
