"""The random weights of seeded models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["ATTENTION_GAIN", "NOISE_STD", "TIED_EMBEDDING_STD", "quieten", "seeded_model"]

NOISE_STD = 0.1
"""Of norms and biases."""

TIED_EMBEDDING_STD = 0.05
"""A tied head scores a token by its likeness to the stream's content; with large embeddings that
content is mostly the input token itself, and greedy decoding repeats it for ever."""

ATTENTION_GAIN = 2.0
"""Flat attention averages the context away, and the last token alone decides the next one."""


def seeded_model(
    make: Callable[[], Any],
    generator: torch.Generator,
    initialise: Callable[[str, nn.Parameter, torch.Generator], None],
) -> Any:
    """Make a model with weights that depend on the generator alone.

    Args:
        make: makes a transformers model, with any weights.
        generator: of the weights.
        initialise: fills the parameter of a name, by the generator.

    Returns:
        The model, ready to run.
    """
    with torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = make()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            initialise(name, parameter, generator)
    return model.eval()


def quieten(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make special tokens and bytes that are no text unlikely, so that outputs can be read."""
    quiet = [
        token_id
        for token_id in range(len(tokenizer))
        if token_id in tokenizer.all_special_ids or not _is_text(str(tokenizer.decode([token_id])))
    ]
    with torch.no_grad():
        model.get_output_embeddings().weight[quiet] *= 0.1


def _is_text(piece: str) -> bool:
    return piece == "\n" or (piece.isprintable() and "\N{REPLACEMENT CHARACTER}" not in piece)
