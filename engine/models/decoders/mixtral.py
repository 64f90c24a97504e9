"""Mixtral: Mistral whose MLPs are mixtures of experts.

Source: Jiang et al., "Mixtral of Experts", 2024.
"""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from engine.layers import ExpertsConfig
from engine.models.decoders.decoder import DecoderConfig, LayerKind, decoder_family

__all__ = ["FAMILY"]


def mixtral_config(config: PreTrainedConfig) -> DecoderConfig:
    """All layers have experts, and the window if there is one."""
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


FAMILY = decoder_family("mixtral", ("MixtralForCausalLM", "MixtralModel"), mixtral_config)
