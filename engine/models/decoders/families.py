"""The plain decoders: mapping of each family's config to :mod:`engine.models.decoders.decoder`.

Sources: Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", 2024, and
"Gemma 3 Technical Report", 2025; Jiang et al., "Mixtral of Experts", 2024.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from engine.layers import ExpertsConfig
from engine.models.decoders.decoder import DecoderConfig, LayerKind, layer_kinds


def llama_config(config: PreTrainedConfig) -> DecoderConfig:
    """Read a Llama config: the plain decoder; ``attention_bias`` covers all four projections."""
    return replace(_biased(config), mlp_bias=config.mlp_bias)


def _biased(config: PreTrainedConfig) -> DecoderConfig:
    bias = config.attention_bias
    return replace(DecoderConfig.from_transformers(config), qkv_bias=bias, output_bias=bias)


def mistral_config(config: PreTrainedConfig) -> DecoderConfig:
    """Read a Mistral config: no biases, one window for all layers, whatever ``layer_types`` is."""
    plain = DecoderConfig.from_transformers(config)
    return replace(plain, layers=(LayerKind(config.sliding_window),) * len(plain.layers))


def ministral_config(config: PreTrainedConfig) -> DecoderConfig:
    """Read a Ministral config: sliding layers by ``layer_types``; no biases, unlike Qwen2."""
    return replace(DecoderConfig.from_transformers(config), layers=layer_kinds(config))


def mixtral_config(config: PreTrainedConfig) -> DecoderConfig:
    """Read a Mixtral config: Mistral with experts in all layers, and an optional window."""
    plain = DecoderConfig.from_transformers(config)
    experts = ExpertsConfig(
        config.num_local_experts,
        config.num_experts_per_tok,
        config.intermediate_size,
        normalize=True,
        names=("w1", "w3", "w2"),
    )
    kind = LayerKind(config.sliding_window, experts=experts)
    return replace(plain, layers=(kind,) * len(plain.layers), mlp_name="block_sparse_moe")


def qwen2_config(config: PreTrainedConfig) -> DecoderConfig:
    """Read a Qwen2 or Qwen2.5 config: biases on Q, K and V only, always."""
    return replace(ministral_config(config), qkv_bias=True)


def qwen3_config(config: PreTrainedConfig) -> DecoderConfig:
    """Read a Qwen3 config: normalised heads of Q and K, and an explicit head size."""
    return replace(_biased(config), layers=layer_kinds(config), qk_norm=True)


def qwen3_moe_config(config: PreTrainedConfig, **declared: Any) -> DecoderConfig:
    """Read a Qwen3-MoE config: experts by ``mlp_only_layers`` and ``decoder_sparse_step``.

    Args:
        **declared: further fields of :class:`ExpertsConfig`.
    """
    plain, window = _biased(config), getattr(config, "sliding_window", None)
    experts = None
    if getattr(config, "num_experts", 0) > 0:
        experts = ExpertsConfig(
            config.num_experts,
            config.num_experts_per_tok,
            config.moe_intermediate_size,
            # Configs without this setting normalise.
            normalize=getattr(config, "norm_topk_prob", True),
            **declared,
        )

    def kind(index: int) -> LayerKind:
        every = getattr(config, "decoder_sparse_step", 1)
        has_one = index in getattr(config, "mlp_only_layers", ()) or (index + 1) % every
        return LayerKind(window, experts=None if has_one else experts)

    return replace(plain, layers=tuple(map(kind, range(len(plain.layers)))), qk_norm=True)


def _gemma_config(config: PreTrainedConfig) -> DecoderConfig:
    """Read what Gemma-2 and Gemma-3 have in common.

    Raises:
        ValueError: attention is bidirectional, as in embedding models based on Gemma.
    """
    if config.use_bidirectional_attention:
        raise ValueError(
            f"{type(config).__name__} asks for bidirectional attention; only causal attention "
            "is supported"
        )
    return replace(
        _biased(config),
        attention_scale=config.query_pre_attn_scalar**-0.5,
        logit_softcap=config.final_logit_softcapping,
        embedding_scale=config.hidden_size**0.5,
        norm_offset=1.0,
        output_norms=True,
    )


def gemma2_config(config: PreTrainedConfig) -> DecoderConfig:
    """Read a Gemma-2 config: windows on every second layer, soft caps on scores and logits."""
    softcap = config.attn_logit_softcapping
    return replace(_gemma_config(config), layers=layer_kinds(config), attention_softcap=softcap)


def gemma3_config(config: PreTrainedConfig) -> DecoderConfig:
    """Read a Gemma-3 config: normalised heads, no soft caps on scores, rope per layer type.

    ``attn_logit_softcapping`` is ignored, as in transformers.
    """
    ropes = ("sliding_attention", "full_attention")
    layers = layer_kinds(config, ropes)
    return replace(_gemma_config(config), layers=layers, ropes=ropes, qk_norm=True)
