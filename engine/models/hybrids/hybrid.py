"""Hybrid decoders whose layers mix tokens by attention or by a recurrence.

Jamba has Mamba-1 layers, attention layers without positions, and experts in some of the MLPs.
Bamba has Mamba-2 layers, and attention layers that rotate half of each head's channels. Qwen3-Next
and Qwen3.5 have gated delta rule layers, gated attention, and optionally experts with a shared one.
One layer::

    residual ──norm──► attention or a state ──► + ──norm──► MLP or experts ──► + (next layer's norm)

Sources: Lieber et al., "Jamba: A Hybrid Transformer-Mamba Language Model", 2024; IBM, Princeton,
CMU and UIUC, "Bamba: Inference-Efficient Hybrid Mamba2 Model", 2024; transformers' ``qwen3_next``
and ``qwen3_5``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedConfig

from engine.checkpoints.checkpoint import Checkpoint
from engine.layers import (
    DeltaRuleMixer,
    ExpertsConfig,
    Mamba2Mixer,
    MambaMixer,
    RecurrentMixer,
    RotaryEmbedding,
)
from engine.models.base import ModelSettings
from engine.models.decoders.decoder import (
    DecoderConfig,
    DecoderLayer,
    DecoderModel,
    LayerKind,
    build_rotary,
)
from engine.models.decoders.families import llama_config, qwen3_moe_config
from engine.models.family import has_head


def build_jamba(checkpoint: Checkpoint, settings: ModelSettings) -> DecoderModel:
    """Build a Jamba, its weights not yet loaded; see :data:`Builder`."""
    config = checkpoint.config
    decoder = DecoderConfig.from_transformers(config)
    # One expert is a plain MLP, without a router.
    experts = [
        ExpertsConfig(count, config.num_experts_per_tok, config.intermediate_size, router="router")
        if count > 1
        else None
        for count in config.layers_num_experts
    ]
    kinds = tuple(LayerKind(rope=None, experts=each) for each in experts)
    decoder = replace(decoder, layers=kinds, **_MAMBA_NAMES)
    layers = _build_layers(config, settings, decoder, "mamba", MambaMixer)
    return DecoderModel(decoder, (), settings, has_head=has_head(checkpoint), layers=layers)


def build_bamba(checkpoint: Checkpoint, settings: ModelSettings) -> DecoderModel:
    """Build a Bamba, its weights not yet loaded; see :data:`Builder`."""
    config = checkpoint.config
    decoder = replace(llama_config(config), **_MAMBA_NAMES)
    layers = _build_layers(config, settings, decoder, "mamba", Mamba2Mixer)
    rotaries = [build_rotary(config, settings)]
    return DecoderModel(decoder, rotaries, settings, has_head=has_head(checkpoint), layers=layers)


def build_qwen3_next(
    checkpoint: Checkpoint, settings: ModelSettings, *, interleaved: bool = True
) -> DecoderModel:
    """Build a Qwen3-Next, or without ``interleaved`` a text-only Qwen3.5; see :data:`Builder`."""
    config = checkpoint.config
    rotary, decoder = build_rotary(config, settings), delta_config(config)
    head = has_head(checkpoint)
    return build_delta(config, settings, decoder, rotary, has_head=head, interleaved=interleaved)


build_qwen3_5 = partial(build_qwen3_next, interleaved=False)


def delta_config(config: PreTrainedConfig, **declared: Any) -> DecoderConfig:
    """Read the config of a decoder with gated delta rules and gated attention.

    Args:
        **declared: further fields of its :class:`ExpertsConfig`, if it has experts.
    """
    shared_size = getattr(config, "shared_expert_intermediate_size", 0)
    decoder = qwen3_moe_config(config, shared_size=shared_size, **declared)
    return replace(decoder, norm_offset=1.0, attention_gate=True)


def build_delta(
    config: PreTrainedConfig,
    settings: ModelSettings,
    decoder: DecoderConfig,
    rotary: RotaryEmbedding,
    *,
    has_head: bool,
    interleaved: bool,
) -> DecoderModel:
    """Build a decoder with :class:`~engine.layers.DeltaRuleMixer`, its weights not yet loaded."""
    make_mixer = partial(DeltaRuleMixer, interleaved=interleaved)
    layers = _build_layers(config, settings, decoder, "linear_attn", make_mixer)
    return DecoderModel(decoder, [rotary], settings, has_head=has_head, layers=layers)


_MAMBA_NAMES: dict[str, Any] = {
    "mlp_name": "feed_forward",
    "mlp_norm_name": "pre_ff_layernorm",
    "final_norm_name": "final_layernorm",
}


def _build_layers(
    config: PreTrainedConfig,
    settings: ModelSettings,
    decoder: DecoderConfig,
    name: str,
    make_mixer: Callable[..., RecurrentMixer],
) -> list[DecoderLayer]:
    """Build the layers; those without attention get a mixer with this checkpoint name."""
    layers = []
    for index, layer_type in enumerate(config.layer_types):
        mixer = None
        if layer_type != "full_attention":
            at, size = f"layers.{index}.{name}", settings.block_size
            options = settings.tensor_options
            mixer = name, make_mixer(at, config, size, ops=settings.ops, **options)
        layers.append(DecoderLayer(index, decoder, settings, mixer))
    return layers
