"""The random weights of seeded models, and the folders that they are written to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.checkpoints.quiet_transformers import hidden_progress_bars

__all__ = [
    "ATTENTION_GAIN",
    "NOISE_STD",
    "TIED_EMBEDDING_STD",
    "initialise",
    "quieten",
    "save_checkpoint",
    "seeded_model",
]

NOISE_STD = 0.1
"""Of norms and biases."""

TIED_EMBEDDING_STD = 0.05
"""A tied head scores a token by its likeness to the stream's content; with large embeddings that
content is mostly the input token itself, and greedy decoding repeats it for ever."""

ATTENTION_GAIN = 2.0
"""Flat attention averages the context away, and the last token alone decides the next one."""

# Mllama's gates start shut, and its image layers would do nothing.
_OPEN_GATE = 0.7
_EMBEDDINGS = ("embed_tokens", "shared", "codec_embed", "audio_bos_eos_token")


def seeded_model(
    make: Callable[[], Any],
    generator: torch.Generator,
    draw: Callable[[str, nn.Parameter, torch.Generator], None],
) -> Any:
    """Make a model, ready to run, with weights that depend on the generator alone.

    Args:
        make: makes a transformers model, with any weights.
        generator: of the weights.
        draw: fills the parameter of a name, by the generator.
    """
    with torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = make()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw(name, parameter, generator)
    return model.eval()


def initialise(
    name: str,
    parameter: nn.Parameter,
    generator: torch.Generator,
    *,
    tied: bool,
    gains: Mapping[str, float],
) -> None:
    """Fan-in for matrices, so that every layer matters; noise on norms and biases.

    Args:
        name: in the model.
        parameter: filled in place.
        generator: of the weights.
        tied: whether the head is the embedding matrix.
        gains: factors of matrices, by the names of their layers.
    """
    owner = name.split(".")[-2]
    if "gate" in name and parameter.numel() == 1:
        parameter.fill_(_OPEN_GATE)
    elif parameter.ndim < 2:
        is_scale = name.endswith("weight") and ("norm" in owner or owner.startswith("ln"))
        parameter.normal_(1.0 if is_scale else 0.0, NOISE_STD, generator=generator)
    elif owner in _EMBEDDINGS:
        parameter.normal_(0.0, TIED_EMBEDDING_STD if tied else 1.0, generator=generator)
    elif "position" in name or "relative_attention_bias" in name:
        # Beside small embeddings, what is learned per position has to matter as well.
        parameter.normal_(0.0, 1.0, generator=generator)
    else:
        fan_in = parameter[0].numel()
        parameter.normal_(0.0, fan_in**-0.5, generator=generator).mul_(gains.get(owner, 1.0))


def quieten(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make special tokens and bytes that are no text unlikely, so that outputs can be read."""
    quiet = [
        token_id
        for token_id in range(len(tokenizer))
        if token_id in tokenizer.all_special_ids or not _is_text(str(tokenizer.decode([token_id])))
    ]
    with torch.no_grad():
        model.get_output_embeddings().weight[quiet] *= 0.1


def save_checkpoint(
    directory: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    max_shard_size: str | None = None,
) -> Path:
    """Write config, weights and tokenizer.

    Args:
        directory: created if missing, and returned.
        model: as it is to be saved, its generation config included.
        tokenizer: saved beside it, if there is one.
        max_shard_size: as ``save_pretrained`` takes it; by default one file.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    shards: dict[str, Any] = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    with hidden_progress_bars():
        model.save_pretrained(path, **shards)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return path


def _is_text(piece: str) -> bool:
    return piece == "\n" or (piece.isprintable() and "\N{REPLACEMENT CHARACTER}" not in piece)
