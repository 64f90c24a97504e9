"""The files of a seeded checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.checkpoints.quiet_transformers import hidden_progress_bars

__all__ = ["save_checkpoint"]


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
