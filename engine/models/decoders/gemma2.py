"""Gemma-2: windows on every second layer, soft caps, norms on both sides of each sublayer.

Source: Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", 2024.
"""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from engine.models.decoders.decoder import DecoderConfig, decoder_family, layer_kinds

__all__ = ["FAMILY", "gemma_config"]


def gemma2_config(config: PreTrainedConfig) -> DecoderConfig:
    """Soft caps on scores and logits."""
    return replace(
        gemma_config(config),
        layers=layer_kinds(config),
        attention_softcap=config.attn_logit_softcapping,
    )


def gemma_config(config: PreTrainedConfig) -> DecoderConfig:
    """What Gemma-2 and Gemma-3 have in common.

    Raises:
        ValueError: tokens attend to later ones too, as in embedding models made of Gemma.
    """
    if config.use_bidirectional_attention:
        raise ValueError(
            f"{type(config).__name__} asks for bidirectional attention; only causal attention "
            "is supported"
        )
    return replace(
        DecoderConfig.from_transformers(config),
        attention_scale=config.query_pre_attn_scalar**-0.5,
        logit_softcap=config.final_logit_softcapping,
        embedding_scale=config.hidden_size**0.5,
        norm_offset=1.0,
        output_norms=True,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
    )


FAMILY = decoder_family(
    "gemma2", ("Gemma2ForCausalLM", "Gemma2Model"), gemma2_config, is_base=False
)
