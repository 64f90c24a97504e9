"""Models by names that packages bring, such as ``seeded:<name>``."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path

__all__ = ["ENTRY_POINTS", "folder_of_source"]

ENTRY_POINTS = "omni_pipeline.model_sources"
"""Group of the entry points by which packages bring names of models. An entry's name is what stands
before the colon; its object is a function from the whole reference to a folder."""

# Longer than the letter of a drive.
_REFERENCE = re.compile(r"([A-Za-z][\w+-]+):.*", re.DOTALL)


def folder_of_source(model: str) -> Path | None:
    """Ask the package that brings such names for the folder of a model, which it may build.

    Args:
        model: as a user gives it.

    Returns:
        The folder; None for what has no such form, as hub ids have not.

    Raises:
        ValueError: no installed package brings such names, or it has no such model.
    """
    match = _REFERENCE.fullmatch(model)
    if match is None:
        return None
    source = match[1]
    for entry_point in entry_points(group=ENTRY_POINTS, name=source):
        try:
            locate = entry_point.load()
        except Exception as error:  # whatever a package raises is this model's error
            raise ValueError(
                f"model {model!r}: {entry_point.value!r} cannot be loaded: "
                f"{type(error).__name__}: {error}"
            ) from error
        return Path(locate(model))
    known = sorted(f"{name}:" for name in entry_points(group=ENTRY_POINTS).names)
    raise ValueError(
        f"model {model!r}: no installed package brings models named {source}:...; known are "
        f"{', '.join(known) or 'none'}. After an update of an editable install: pip install -e ."
    )
