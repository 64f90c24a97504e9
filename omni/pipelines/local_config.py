"""The config of a checkpoint that is here already, for checks before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.files.json_file import read_json_object
from omni.seeded.checkpoints import SEEDED_MODELS, SEEDED_PREFIX

__all__ = ["local_config"]

_FILE = "config.json"
_MAX_BYTES = 10_000_000


def local_config(model: str) -> Mapping[str, Any] | None:
    """Read the ``config.json`` of a model, if that takes neither a network nor building it.

    Args:
        model: a folder, a hub id, or ``seeded:<name>``, of which only what decides on its kind is
            known.

    Returns:
        Its content; None where it is not here or cannot be read, which loading the model will tell.
    """
    if model.startswith(SEEDED_PREFIX):
        seeded = SEEDED_MODELS.get(model.removeprefix(SEEDED_PREFIX))
        return None if seeded is None else seeded.says
    file = Path(model, _FILE) if Path(model).is_dir() else _cached(model)
    try:
        return None if file is None else read_json_object(file, most_bytes=_MAX_BYTES)
    except (OSError, ValueError):
        return None


def _cached(hub_id: str) -> Path | None:
    """Where a download of the hub's has put it."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(hub_id, _FILE)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None
