"""Qwen2 and Qwen2.5: biases on Q, K and V alone; a window on the upper layers if switched on."""

from __future__ import annotations

from transformers import PreTrainedConfig

from engine.models.decoder_config import DecoderConfig

__all__ = ["active_window", "qwen2_config"]


def qwen2_config(config: PreTrainedConfig) -> DecoderConfig:
    """The biases are fixed by the family, not by the config."""
    return DecoderConfig.from_transformers(
        config, qkv_bias=True, sliding_window=active_window(config)
    )


def active_window(config: PreTrainedConfig) -> int | None:
    """The window, if any layer has one: ``layer_types`` decides, per layer.

    ``sliding_window`` alone does not: configs state it also where ``use_sliding_window`` is
    false, or where ``max_window_layers`` leaves no layer to it.
    """
    if "sliding_attention" not in config.layer_types:
        return None
    window: int | None = config.sliding_window
    return window
