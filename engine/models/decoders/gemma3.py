"""Gemma-3's text model: normalised heads for soft caps, rope parameters per layer type.

Source: Gemma Team, "Gemma 3 Technical Report", 2025.
"""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from engine.models.decoders.decoder import DecoderConfig, decoder_family, layer_kinds
from engine.models.decoders.gemma2 import gemma_config

__all__ = ["FAMILY"]

_ROPES = ("sliding_attention", "full_attention")


def gemma3_config(config: PreTrainedConfig) -> DecoderConfig:
    """Scores are not capped, whatever ``attn_logit_softcapping`` says: nothing reads it."""
    return replace(
        gemma_config(config), layers=layer_kinds(config, _ROPES), ropes=_ROPES, qk_norm=True
    )


FAMILY = decoder_family(
    "gemma3", ("Gemma3ForCausalLM", "Gemma3TextModel"), gemma3_config, is_base=False
)
