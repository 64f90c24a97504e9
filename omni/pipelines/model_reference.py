"""What the ``model`` of a stage may name."""

from __future__ import annotations

import re
from pathlib import Path

from omni.documents.suggestion import suggest
from omni.seeded.checkpoints import SEEDED_MODELS

__all__ = ["locate_model"]

_SEEDED = "seeded:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def locate_model(reference: str, base_dir: Path | None = None) -> str:
    """Find the folder that a reference names, or leave a hub id and ``seeded:<name>`` as they are.

    A relative folder is looked for beside the file that names it first, then in the working
    directory; a reference that is no folder and cannot be a path is a hub id.

    Args:
        reference: as given by the user.
        base_dir: folder of the file that gives it.

    Raises:
        ValueError: an unknown seeded model, a folder that is not there or holds no checkpoint, or
            what is neither a path nor a hub id.
    """
    if reference.startswith(_SEEDED):
        name = reference.removeprefix(_SEEDED)
        if name not in SEEDED_MODELS:
            raise ValueError(f"unknown seeded model {name!r}{suggest(name, SEEDED_MODELS)}")
        return reference
    path = Path(reference).expanduser()
    candidates = [path] if base_dir is None or path.is_absolute() else [base_dir / path, path]
    folder = next((candidate for candidate in candidates if candidate.exists()), None)
    if folder is not None:
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"{str(folder)!r} is no checkpoint: a folder with a config.json is needed"
            )
        return str(folder)
    if reference.startswith((".", "~", "/")) or not _HUB_ID.fullmatch(reference):
        looked_in = " or ".join(dict.fromkeys(repr(str(place.absolute())) for place in candidates))
        raise ValueError(f"no such folder: {looked_in}")
    return reference
