"""Small checkpoints with seeded random weights, in the real Hugging Face layout.

They make the pipeline runnable and testable offline: ``config.json``, safetensors weights, a
trained tokenizer and a chat template, all built in memory in about a second. The texts such a
model writes are word salad, but they depend on the whole input, which is what a test of caching
needs. Stage configs name them ``seeded:<name>``; see :func:`resolve_model`.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from omni.seeded.encoder_decoders import (
    BART_BENCHMARK,
    build_bart,
    build_mllama,
    build_t5,
    build_whisper,
)
from omni.seeded.folder import quieten, save_checkpoint
from omni.seeded.hybrids import HYBRID_SETTINGS, initialise_recurrence
from omni.seeded.multimodal import build_llava, build_qwen2_5_vl
from omni.seeded.omni import OMNI_BENCHMARK, build_qwen2_5_omni
from omni.seeded.tokenizers import chat_tokenizer, wordpiece_tokenizer

__all__ = [
    "SEEDED_MODELS",
    "SEEDED_WINDOW",
    "build_benchmark_qwen2",
    "build_causal_lm",
    "build_text_encoder",
    "resolve_model",
]

_PREFIX = "seeded:"

SEEDED_WINDOW = 16
"""Positions that a token sees in the sliding layers of seeded models, itself included."""

_LAYER_PATTERNS = {
    "ministral": ["sliding_attention", "full_attention"],
    "gemma2": ["sliding_attention", "full_attention"],
    "gemma3_text": ["sliding_attention", "sliding_attention", "full_attention"],
}

# A tied head scores a token by its likeness to the stream's content; with large embeddings that
# content is mostly the input token itself, and greedy decoding repeats it for ever.
_TIED_EMBEDDING_STD = 0.05
_NOISE_STD = 0.1
# Flat attention averages the context away, and the last token alone decides the next one.
_ATTENTION_GAIN = 2.0


def build_causal_lm(
    directory: str | Path,
    architecture: str = "qwen2",
    *,
    seed: int = 0,
    tied: bool = True,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    intermediate_size: int = 128,
    vocab_size: int = 768,
    max_position_embeddings: int = 1024,
    max_shard_size: str | None = None,
    with_head: bool = True,
    with_tokenizer: bool = True,
    **config_overrides: Any,
) -> Path:
    """Write a seeded decoder-only checkpoint.

    Args:
        directory: created if missing.
        architecture: a transformers model type: ``"qwen2"``, ``"llama"``, ``"gemma2"``, ...
        seed: of the weights; the same seed gives the same bytes.
        tied: whether the head is the embedding matrix.
        hidden_size: width of the stream.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        intermediate_size: width inside the MLP.
        vocab_size: of the model. The tokenizer has at most so many tokens, and at most 768.
        max_position_embeddings: the longest sequence.
        max_shard_size: as ``save_pretrained`` takes it, such as ``"100KB"``, for several shards.
        with_head: False writes the headless model (``Qwen2Model``), as embedding models are.
        with_tokenizer: whether to write a byte-level BPE tokenizer with a chat template.
        config_overrides: further fields of the transformers config.

    Returns:
        The directory.

    Raises:
        ValueError: transformers knows no causal model of that type.
    """
    tokenizer = chat_tokenizer(min(vocab_size, 768), adds_bos=architecture != "qwen2")
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": tied,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    settings |= _family_settings(architecture, num_layers, settings["head_dim"])
    config = _config(architecture, settings | config_overrides)
    auto_class = AutoModelForCausalLM if with_head else AutoModel
    model = _seeded_model(auto_class, config, seed)
    if with_head:
        quieten(model, tokenizer)
    return save_checkpoint(directory, model, tokenizer if with_tokenizer else None, max_shard_size)


def build_text_encoder(
    directory: str | Path,
    architecture: str = "bert",
    *,
    seed: int = 0,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    intermediate_size: int = 128,
    vocab_size: int = 768,
    max_position_embeddings: int = 512,
    max_shard_size: str | None = None,
    **config_overrides: Any,
) -> Path:
    """Write a seeded bidirectional text encoder with a WordPiece tokenizer.

    Args:
        directory: created if missing.
        architecture: ``"bert"``, or another model type whose config takes BERT's names
            (``"electra"``, ``"roberta"``).
        seed: of the weights.
        hidden_size: width of the hidden states.
        num_layers: encoder layers.
        num_heads: attention heads.
        intermediate_size: width inside the MLP.
        vocab_size: of the model; the tokenizer has at most so many tokens.
        max_position_embeddings: the longest input.
        max_shard_size: as ``save_pretrained`` takes it.
        config_overrides: further fields of the transformers config.

    Returns:
        The directory.

    Raises:
        ValueError: transformers knows no such model type.
    """
    tokenizer = wordpiece_tokenizer(vocab_size, max_position_embeddings)
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "max_position_embeddings": max_position_embeddings,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = _config(architecture, settings | config_overrides)
    return save_checkpoint(
        directory, _seeded_model(AutoModel, config, seed), tokenizer, max_shard_size
    )


def build_benchmark_qwen2(directory: str | Path) -> Path:
    """Write the Qwen2 of about 0.1 B parameters that the CPU benchmark runs (fp32, tied).

    Without a tokenizer, so that both sides of the benchmark turn ids into ids and no more.
    """
    return build_causal_lm(
        directory,
        "qwen2",
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        num_kv_heads=4,
        intermediate_size=2048,
        vocab_size=32_000,
        max_position_embeddings=4096,
        with_tokenizer=False,
    )


# Large enough for the arithmetic to outweigh a step's fixed cost, small enough to build at once.
_MEDIUM: dict[str, Any] = {
    "tied": False,
    "hidden_size": 512,
    "num_layers": 3,
    "num_heads": 8,
    "intermediate_size": 1536,
}

SEEDED_MODELS: dict[str, Callable[[str | Path], Path]] = {
    "qwen2": build_causal_lm,
    "qwen2-untied": partial(build_causal_lm, tied=False, seed=1),
    "qwen2-headless": partial(build_causal_lm, with_head=False, seed=2),
    "qwen2-benchmark": build_benchmark_qwen2,
    "qwen2-medium": partial(build_causal_lm, **_MEDIUM),
    "qwen3": partial(build_causal_lm, architecture="qwen3"),
    "llama": partial(build_causal_lm, architecture="llama"),
    "llama-untied": partial(build_causal_lm, architecture="llama", tied=False, seed=1),
    "llama-medium": partial(build_causal_lm, architecture="llama", **_MEDIUM),
    "mistral": partial(build_causal_lm, architecture="mistral", tied=False),
    "mistral-sliding": partial(
        build_causal_lm, architecture="mistral", tied=False, sliding_window=SEEDED_WINDOW
    ),
    "qwen2-sliding": partial(
        build_causal_lm,
        use_sliding_window=True,
        sliding_window=SEEDED_WINDOW,
        max_window_layers=1,
    ),
    "ministral": partial(build_causal_lm, architecture="ministral", tied=False),
    "gemma2": partial(build_causal_lm, architecture="gemma2"),
    "gemma3": partial(build_causal_lm, architecture="gemma3_text", num_layers=3),
    "jamba": partial(build_causal_lm, architecture="jamba", tied=False, num_layers=4),
    "bamba": partial(build_causal_lm, architecture="bamba", tied=False, num_layers=4),
    "bart": build_bart,
    "bart-benchmark": partial(build_bart, **BART_BENCHMARK),
    "t5": build_t5,
    "t5-gated": partial(build_t5, gated=True),
    "whisper": build_whisper,
    "mllama": build_mllama,
    "llava": build_llava,
    "qwen2_5_vl": build_qwen2_5_vl,
    "qwen2_5_omni": build_qwen2_5_omni,
    "qwen2_5_omni-benchmark": partial(build_qwen2_5_omni, sizes=OMNI_BENCHMARK),
    "bert": build_text_encoder,
}
"""What ``seeded:<name>`` can name: each takes a directory and writes a checkpoint there."""


def resolve_model(reference: str, cache_dir: str | Path | None = None) -> str:
    """Turn ``seeded:<name>`` into a folder, building it on first use; leave the rest alone.

    Folders are kept under ``cache_dir``, by default ``$OMNI_CACHE_DIR`` or
    ``~/.cache/omni-pipeline``, in ``seeded/<name>-<version>``. The version changes with the code
    here and with transformers, so that no old layout is ever picked up. Safe to call from several
    processes: each builds aside, and the first to rename wins.

    Args:
        reference: a model as stage configs give it: folder, hub id or ``seeded:<name>``.
        cache_dir: where to keep what is built.

    Raises:
        ValueError: no seeded model has that name.
    """
    if not reference.startswith(_PREFIX):
        return reference
    name = reference.removeprefix(_PREFIX)
    build = SEEDED_MODELS.get(name)
    if build is None:
        known = ", ".join(_PREFIX + known_name for known_name in SEEDED_MODELS)
        raise ValueError(f"unknown seeded model {reference!r}; known are {known}")
    parent = _cache_root(cache_dir) / "seeded"
    target = parent / f"{name}-{_version()}"
    if not target.is_dir():
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=parent) as aside:
            built = build(Path(aside) / "checkpoint")
            try:
                built.rename(target)
            except OSError:
                # Another process was first: its folder has the same bytes.
                if not target.is_dir():
                    raise
    return str(target)


def _cache_root(cache_dir: str | Path | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir)
    from_environment = os.environ.get("OMNI_CACHE_DIR")
    return Path(from_environment) if from_environment else Path.home() / ".cache/omni-pipeline"


def _version() -> str:
    content = b"".join(source.read_bytes() for source in sorted(Path(__file__).parent.glob("*.py")))
    return hashlib.sha256(content + transformers.__version__.encode()).hexdigest()[:12]


def _config(model_type: str, settings: dict[str, Any]) -> transformers.PreTrainedConfig:
    return transformers.AutoConfig.for_model(model_type, **settings)


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


def _seeded_model(
    auto_class: Any, config: transformers.PreTrainedConfig, seed: int
) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = auto_class.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    # Recurrences mix the context in by themselves; sharper scores would only magnify rounding.
    gain = 1.0 if config.model_type in HYBRID_SETTINGS else _ATTENTION_GAIN
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not initialise_recurrence(name, parameter, generator):
                sharpness = gain if "attn" in name else 1.0
                tied = bool(config.tie_word_embeddings)
                _initialise(name, parameter, sharpness, tied, generator)
    model.eval()
    return model


def _initialise(
    name: str, parameter: nn.Parameter, sharpness: float, tied: bool, generator: torch.Generator
) -> None:
    """Fan-in for matrices, so that every layer matters; noise on norms and biases."""
    if parameter.ndim == 1:
        # The mean is 1 in norms that scale by their weight, 0 in those that scale by 1 + weight.
        plain = float(parameter.mean())
        centre = plain + sharpness - 1.0 if name.endswith("weight") else 0.0
        parameter.normal_(centre, _NOISE_STD, generator=generator)
    elif "embed" in name:
        parameter.normal_(0.0, _TIED_EMBEDDING_STD if tied else 1.0, generator=generator)
    else:
        parameter.normal_(0.0, sharpness * parameter.shape[-1] ** -0.5, generator=generator)
