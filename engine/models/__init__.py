"""Models over packed tokens, loaded from Hugging Face checkpoints."""

from __future__ import annotations

from engine.models.base import CausalModel
from engine.models.decoders.decoder import DecoderModel
from engine.models.decoders.decoder_config import DecoderConfig
from engine.models.encoder_decoder import EncoderDecoderModel
from engine.models.multimodal import MultiModalModel
from engine.models.registry import SUPPORTED_ARCHITECTURES, load_model, max_positions

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "CausalModel",
    "DecoderConfig",
    "DecoderModel",
    "EncoderDecoderModel",
    "MultiModalModel",
    "load_model",
    "max_positions",
]
