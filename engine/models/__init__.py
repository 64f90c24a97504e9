"""Models over packed tokens, loaded from Hugging Face checkpoints."""

from __future__ import annotations

from engine.models.base import CausalModel
from engine.models.decoders.decoder import DecoderModel
from engine.models.decoders.decoder_config import DecoderConfig
from engine.models.encoder_decoder import EncoderDecoderModel
from engine.models.family import ModelFamily
from engine.models.model_loader import load_model, max_positions
from engine.models.model_settings import ModelSettings
from engine.models.multimodal import MultiModalModel

__all__ = [
    "CausalModel",
    "DecoderConfig",
    "DecoderModel",
    "EncoderDecoderModel",
    "ModelFamily",
    "ModelSettings",
    "MultiModalModel",
    "load_model",
    "max_positions",
]
