"""Qwen2.5-VL: images of any size and videos, and tokens placed in time, height and width.

What follows a video has the places after all of it, as the model was trained (Wang et al.,
"Qwen2-VL", section 2.1), and as in transformers up to 5.2. Newer versions go on after its height or
width, whichever is more: the same where a video ends sooner than that, and otherwise a text that is
placed among the video's grids, from which their ``generate`` then jumps away.

Source: Bai et al., "Qwen2.5-VL Technical Report", 2025; transformers' ``qwen2_5_vl``.
"""

from __future__ import annotations

from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)

from engine.checkpoints.checkpoint import Checkpoint
from engine.inputs.multimodal_inputs import MultiModalPromptProcessor
from engine.models.encoder_module import build_empty
from engine.models.family import ModelFamily
from engine.models.model_settings import ModelSettings
from engine.models.qwen2_5_vl.multi_axis import MultiAxisModel, build_multi_axis_decoder
from engine.models.qwen2_5_vl.qwen2_5_vision import ImageTower, VideoTower

__all__ = ["FAMILY", "build_qwen2_5_vl"]


def build_qwen2_5_vl(checkpoint: Checkpoint, settings: ModelSettings) -> MultiAxisModel:
    """Build a Qwen2.5-VL, its weights not yet loaded; see :data:`Builder`."""
    config = checkpoint.config
    vision = config.vision_config
    module = build_empty(Qwen2_5_VisionTransformerPretrainedModel, vision, settings)
    return MultiAxisModel(
        build_multi_axis_decoder(config, settings),
        {
            "image": ImageTower(module, vision),
            "video": VideoTower(module, vision, float(vision.tokens_per_second)),
        },
        {"image": int(config.image_token_id), "video": int(config.video_token_id)},
        checkpoint.weight_files,
    )


FAMILY = ModelFamily(
    "qwen2_5_vl",
    ("Qwen2_5_VLForConditionalGeneration",),
    build=build_qwen2_5_vl,
    prompts=MultiModalPromptProcessor,
)
