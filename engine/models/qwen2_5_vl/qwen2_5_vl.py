"""Qwen2.5-VL: images of any size, and tokens placed in time, height and width.

Supported are images; videos are not.
Source: Bai et al., "Qwen2.5-VL Technical Report", 2025; transformers' ``qwen2_5_vl``.
"""

from __future__ import annotations

from collections.abc import Collection

from transformers import PreTrainedConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)

from engine.models.encoder_module import build_empty
from engine.models.model_settings import ModelSettings
from engine.models.qwen2_5_vl.multi_axis import MultiAxisModel, build_multi_axis_decoder
from engine.models.qwen2_5_vl.qwen2_5_vision import ImageTower

__all__ = ["build_qwen2_5_vl"]


def build_qwen2_5_vl(
    config: PreTrainedConfig, settings: ModelSettings, stored: Collection[str]
) -> MultiAxisModel:
    """Build a Qwen2.5-VL, its weights not yet loaded.

    Args:
        config: text and vision together.
        settings: types, places and lengths.
        stored: names of the checkpoint's weights.

    Raises:
        ValueError: the config asks for something that is not supported.
    """
    vision = config.vision_config
    module = build_empty(Qwen2_5_VisionTransformerPretrainedModel, vision, settings)
    return MultiAxisModel(
        build_multi_axis_decoder(config, settings),
        {"image": ImageTower(module, vision)},
        {"image": int(config.image_token_id)},
        stored,
    )
