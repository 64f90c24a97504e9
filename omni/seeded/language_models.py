"""Seeded decoders and text encoders of one stack, in the real Hugging Face layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig

from omni.seeded.folder import save_checkpoint
from omni.seeded.hybrids import HYBRID_SETTINGS, initialise_recurrence
from omni.seeded.settings import SEEDED_WINDOW, DecoderSettings, SeededSettings
from omni.seeded.tokenizers import chat_tokenizer, wordpiece_tokenizer
from omni.seeded.weights import ATTENTION_GAIN, NOISE_STD, TIED_EMBEDDING_STD, quieten, seeded_model

__all__ = ["build_causal_lm", "build_text_encoder"]

_LAYER_PATTERNS = {
    "ministral": ["sliding_attention", "full_attention"],
    "gemma2": ["sliding_attention", "full_attention"],
    "gemma3_text": ["sliding_attention", "sliding_attention", "full_attention"],
}


def build_causal_lm(directory: str | Path, architecture: str = "qwen2", **settings: Any) -> Path:
    """Write a seeded decoder-only checkpoint, with a byte-level BPE tokenizer and a chat template.

    Args:
        directory: created if missing.
        architecture: a transformers model type: ``"qwen2"``, ``"llama"``, ``"gemma2"``, ...
        settings: those of ``DecoderSettings``, and further fields of the transformers config.

    Returns:
        The directory.

    Raises:
        ValueError: transformers knows no causal model of that type.
    """
    size, overrides = DecoderSettings.split(settings)
    tokenizer = chat_tokenizer(min(size.vocab_size, 768), adds_bos=architecture != "qwen2")
    head_dim = size.hidden_size // size.num_heads
    fields = _common(size) | {
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": size.tied,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
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

    Args:
        directory: created if missing.
        architecture: ``"bert"``, or another model type whose config takes BERT's names
            (``"electra"``, ``"roberta"``).
        settings: those of ``SeededSettings``, and further fields of the transformers config.

    Returns:
        The directory.

    Raises:
        ValueError: transformers knows no such model type.
    """
    size, overrides = SeededSettings.split(settings, max_position_embeddings=512)
    tokenizer = wordpiece_tokenizer(size.vocab_size, size.max_position_embeddings)
    fields = _common(size) | {"pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(architecture, **(fields | overrides))
    model = _seeded(AutoModel, config, size.seed)
    return save_checkpoint(directory, model, tokenizer, size.max_shard_size)


def _common(size: SeededSettings) -> dict[str, Any]:
    return {
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "max_position_embeddings": size.max_position_embeddings,
    }


def _family_settings(model_type: str, num_layers: int, head_dim: int) -> dict[str, Any]:
    """What a family needs to be small and still itself: several windows fit in a short prompt."""
    if model_type == "mistral":
        return {"sliding_window": None}
    if model_type in HYBRID_SETTINGS:
        return dict(HYBRID_SETTINGS[model_type])
    pattern = _LAYER_PATTERNS.get(model_type)
    if pattern is None:
        return {}
    settings = {"sliding_window": SEEDED_WINDOW, "layer_types": (pattern * num_layers)[:num_layers]}
    # Gemma scales scores by this in place of the head's size.
    return settings | ({"query_pre_attn_scalar": head_dim} if "gemma" in model_type else {})


def _seeded(auto_class: Any, config: PreTrainedConfig, seed: int) -> Any:
    # Recurrences mix the context in by themselves; sharper scores would only magnify rounding.
    gain = 1.0 if config.model_type in HYBRID_SETTINGS else ATTENTION_GAIN

    def initialise(name: str, parameter: nn.Parameter, generator: torch.Generator) -> None:
        if not initialise_recurrence(name, parameter, generator):
            sharpness = gain if "attn" in name else 1.0
            _initialise(name, parameter, sharpness, bool(config.tie_word_embeddings), generator)

    return seeded_model(
        lambda: auto_class.from_config(config, dtype=torch.float32),
        torch.Generator().manual_seed(seed),
        initialise,
    )


def _initialise(
    name: str, parameter: nn.Parameter, sharpness: float, tied: bool, generator: torch.Generator
) -> None:
    """Fan-in for matrices, so that every layer matters; noise on norms and biases."""
    if parameter.ndim == 1:
        # The mean is 1 in norms that scale by their weight, 0 in those that scale by 1 + weight.
        plain = float(parameter.mean())
        centre = plain + sharpness - 1.0 if name.endswith("weight") else 0.0
        parameter.normal_(centre, NOISE_STD, generator=generator)
    elif "embed" in name:
        parameter.normal_(0.0, TIED_EMBEDDING_STD if tied else 1.0, generator=generator)
    else:
        parameter.normal_(0.0, sharpness * parameter.shape[-1] ** -0.5, generator=generator)
