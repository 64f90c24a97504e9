"""Seeded decoders and text encoders of one stack, in the real Hugging Face layout."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig

from omni.seeded.building import (
    ATTENTION_GAIN,
    NOISE_STD,
    TIED_EMBEDDING_STD,
    DecoderSettings,
    SeededSettings,
    chat_tokenizer,
    quieten,
    save_checkpoint,
    seeded_model,
    wordpiece_tokenizer,
)
from omni.seeded.checkpoints import SEEDED_WINDOW

_HYBRIDS: Mapping[str, Mapping[str, Any]] = {
    # With four layers: Mamba, Mamba with experts, attention, Mamba with experts.
    "jamba": {
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "mamba_dt_rank": 4,
    },
    # With four layers: Mamba-2, attention, Mamba-2, Mamba-2.
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "mamba_chunk_size": 16,
    },
    # With four layers: the last one is attention.
    "qwen3_next": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 48,
    },
}
"""Config fields by transformers' model type, for a stream of any width that 8 divides."""

_EXPERTS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
"""The same of mixtures of experts."""

# With steps of about 0.13, as trained models have them, and rates of exp of these, a state loses
# between a fortieth and two fifths of itself at a token.
_STEP = -2.0
_SLOWEST, _FASTEST = -1.5, 1.5

_LAYER_PATTERNS = {
    "ministral": ["sliding_attention", "full_attention"],
    "gemma2": ["sliding_attention", "full_attention"],
    "gemma3_text": ["sliding_attention", "sliding_attention", "full_attention"],
}


def build_causal_lm(directory: str | Path, architecture: str = "qwen2", **settings: Any) -> Path:
    """Write a seeded decoder-only checkpoint, with a byte-level BPE tokenizer and a chat template.

    Raises:
        ValueError: transformers knows no causal model of that type.
    """
    size, overrides = DecoderSettings.split(settings)
    tokenizer = chat_tokenizer(min(size.vocab_size, 768), adds_bos=architecture != "qwen2")
    head_dim = size.hidden_size // size.num_heads
    fields = size.text_config(tokenizer)
    fields |= {"head_dim": head_dim, "tie_word_embeddings": size.tied}
    fields |= _family_settings(architecture, size.num_layers, head_dim)
    config = AutoConfig.for_model(architecture, **(fields | overrides))
    auto_class = AutoModelForCausalLM if size.with_head else AutoModel
    model = _seeded(auto_class, config, size.seed)
    if size.with_head:
        quieten(model, tokenizer)
    written = tokenizer if size.with_tokenizer else None
    return save_checkpoint(directory, model, written, size.max_shard_size)


def build_text_encoder(directory: str | Path, architecture: str = "bert", **settings: Any) -> Path:
    """Write a seeded bidirectional text encoder with a WordPiece tokenizer.

    Raises:
        ValueError: transformers knows no such model type.
    """
    size, overrides = SeededSettings.split(settings, max_position_embeddings=512)
    tokenizer = wordpiece_tokenizer(size.vocab_size, size.max_position_embeddings)
    fields = size.sizes() | {"pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(architecture, **(fields | overrides))
    model = _seeded(AutoModel, config, size.seed)
    return save_checkpoint(directory, model, tokenizer, size.max_shard_size)


def _family_settings(model_type: str, num_layers: int, head_dim: int) -> dict[str, Any]:
    """Settings of a small model of a family: several windows fit in a short prompt."""
    if model_type == "mistral":
        return {"sliding_window": None}
    if model_type in _HYBRIDS or model_type in _EXPERTS:
        return dict({**_HYBRIDS, **_EXPERTS}[model_type])
    pattern = _LAYER_PATTERNS.get(model_type)
    if pattern is None:
        return {}
    settings = {"sliding_window": SEEDED_WINDOW, "layer_types": (pattern * num_layers)[:num_layers]}
    # Gemma scales scores by this in place of the head's size.
    return settings | ({"query_pre_attn_scalar": head_dim} if "gemma" in model_type else {})


def _seeded(auto_class: Any, config: PreTrainedConfig, seed: int) -> Any:
    # Recurrences mix the context in by themselves; sharper scores would only magnify rounding.
    gain = 1.0 if config.model_type in _HYBRIDS else ATTENTION_GAIN
    embedding_std = TIED_EMBEDDING_STD if config.tie_word_embeddings else 1.0

    def initialise(name: str, parameter: nn.Parameter, generator: torch.Generator) -> None:
        """Fan-in for matrices, so that every layer matters; noise on norms and biases."""
        sharpness = gain if "attn" in name else 1.0
        if _initialise_recurrence(name, parameter, generator):
            return
        if parameter.ndim == 1:
            # The mean is 1 in norms that scale by their weight, 0 in those that scale by 1 + it.
            plain = float(parameter.mean())
            centre = plain + sharpness - 1.0 if name.endswith("weight") else 0.0
            parameter.normal_(centre, NOISE_STD, generator=generator)
        elif "embed" in name:
            parameter.normal_(0.0, embedding_std, generator=generator)
        else:
            parameter.normal_(0.0, sharpness * parameter.shape[-1] ** -0.5, generator=generator)

    make = partial(auto_class.from_config, config, dtype=torch.float32)
    return seeded_model(make, torch.Generator().manual_seed(seed), initialise)


def _initialise_recurrence(name: str, parameter: nn.Parameter, generator: torch.Generator) -> bool:
    """Fill a parameter of a recurrence; False if it is none, and left alone.

    Decays are spread, so that some of the state still depends on the start of a long prompt: a
    test of caching has to notice a state that was lost.
    """
    if name.endswith("A_log"):
        centre = torch.linspace(_SLOWEST, _FASTEST, parameter.shape[-1]).expand_as(parameter)
    elif name.endswith(("dt_bias", "dt_proj.bias")):
        centre = torch.full_like(parameter, _STEP)
    elif name.endswith(".D"):
        centre = torch.ones_like(parameter)
    else:
        return False
    parameter.normal_(0.0, NOISE_STD, generator=generator).add_(centre)
    return True
