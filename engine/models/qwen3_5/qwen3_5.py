"""Qwen3.5, dense and with experts: a decoder of gated delta rules with image and video input.

Videos are timestamped per frame in text as in Qwen3-VL, without features of earlier layers.
Source: transformers' ``qwen3_5`` and ``qwen3_5_moe``.
"""

from __future__ import annotations

from dataclasses import replace

from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

from engine.checkpoints.checkpoint import Checkpoint
from engine.models.base import ModelSettings
from engine.models.decoders.decoder import build_multi_axis_rotary
from engine.models.encoder_module import build_empty
from engine.models.hybrids.hybrid import build_delta, delta_config
from engine.models.qwen2_5_vl.qwen2_5_vl import ImageTower, MultiAxisModel
from engine.models.qwen3_vl.qwen3_vl import DatedVideoTower


def build_qwen3_5(checkpoint: Checkpoint, settings: ModelSettings) -> MultiAxisModel:
    """Build a Qwen3.5, its weights not yet loaded; see :data:`Builder`."""
    config = checkpoint.config
    text, vision = config.text_config, config.vision_config
    decoder = replace(delta_config(text), tie_word_embeddings=bool(config.tie_word_embeddings))
    rotary = build_multi_axis_rotary(text, settings, interleaved=True, usual=(11, 11, 10))
    module = build_empty(Qwen3_5VisionModel, vision, settings)
    return MultiAxisModel(
        build_delta(text, settings, decoder, rotary, has_head=True, interleaved=False),
        {"image": ImageTower(module, vision), "video": DatedVideoTower(module, vision)},
        {"image": int(config.image_token_id), "video": int(config.video_token_id)},
        checkpoint.weight_files,
    )
