"""The folder of a seeded checkpoint: the last touch to its weights, and its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.checkpoints.progress_bars import hidden_progress_bars

__all__ = ["quieten", "save_checkpoint"]


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


def save_checkpoint(
    directory: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    max_shard_size: str | None = None,
) -> Path:
    """Write config, weights and tokenizer.

    Args:
        directory: created if missing.
        model: as it is to be saved, its generation config included.
        tokenizer: saved beside it, if there is one.
        max_shard_size: as ``save_pretrained`` takes it; by default one file.

    Returns:
        The directory.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    shards: dict[str, Any] = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    with hidden_progress_bars():
        model.save_pretrained(path, **shards)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return path
