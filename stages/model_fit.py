"""Checks that a checkpoint fits a stage, based on its config, without its weights."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from engine.files.json_file import read_json_object
from engine.interface.outputs import ROW_KEYS
from engine.models.registry import FAMILIES, FamilyRow

_Misfit = tuple[str, str] | None


def family_row(config: Mapping[str, Any], part: str | None) -> FamilyRow | None:
    """Look up a model in the table of families; None if it is unknown."""
    model_type, architectures = str(config.get("model_type")), config.get("architectures")
    if parts := FAMILIES.known_parts(model_type):
        row = parts.get(part)
        return row if isinstance(row, FamilyRow) else None
    if isinstance(architectures, list) and architectures:
        return FAMILIES.rows.get(str(architectures[0]))
    return next((row for row in FAMILIES.rows.values() if row.base_type == model_type), None)


def speakers_in(model: str, part: str | None) -> tuple[str, ...] | None:
    """Return the names of a checkpoint's voices; None if it has none, or is no local folder.

    Raises:
        ValueError: a file of the checkpoint cannot be read.
    """
    folder = Path(model)
    file = folder / "config.json"
    row = family_row(read_json_object(file), part) if file.is_file() else None
    return None if row is None else row.speakers_in(folder)


def misfit_of_outputs(emitted: Collection[str] | None, outputs: Collection[str] | None) -> _Misfit:
    """Report outputs of a stage that its model does not emit, if that is known."""
    unknown = sorted(set(outputs or ()).difference(emitted or outputs or (), {ROW_KEYS}))
    if emitted is None or not unknown:
        return None
    names = ", ".join(map(repr, unknown))
    return "outputs", f"the model has no per-token output {names}; it emits {', '.join(emitted)}"


def misfit_of(config: Mapping[str, Any], part: str | None, *, makes_sound: bool) -> _Misfit:
    """Report why a model does not generate tokens, or audio from tokens, if that is known.

    Args:
        config: the content of ``config.json``, unchecked.
        makes_sound: True to require a model that generates audio.

    Returns:
        The wrong key of the stage, ``part`` or ``kind``, and a description of the problem.
    """
    if parts := FAMILIES.known_parts(str(config.get("model_type"))):
        known = {str(name): each.makes_sound for name, each in parts.items()}
        return _misfit_of_part(known, part, makes_sound)
    misfit = None
    architectures = config.get("architectures")
    if part is not None and "model_type" in config:
        problem = f"got {part!r}, but the checkpoint is one model without parts: leave it out"
        misfit = "part", problem
    elif isinstance(architectures, list) and architectures:
        misfit = _misfit_of_architecture(str(architectures[0]), makes_sound)
    # Searching entry points is slow, and only needed if something seems wrong.
    return None if misfit is None or FAMILIES.may_grow() else misfit


def _misfit_of_part(known: Mapping[str, bool], part: str | None, makes_sound: bool) -> _Misfit:
    names = ", ".join(known)
    if part is None:
        return "part", f"missing; the checkpoint holds several models: {names}"
    if part not in known:
        close = difflib.get_close_matches(part, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return "part", f"the checkpoint has no part {part!r}, but {names}{hint}"
    if known[part] is makes_sound:
        return None
    return "kind", _wrong_kind(f"part {part!r}", known[part])


def _misfit_of_architecture(architecture: str, makes_sound: bool) -> _Misfit:
    subject = f"architecture {architecture!r}"
    if architecture in FAMILIES.architectures(makes_sound=makes_sound):
        return None
    if architecture in FAMILIES.architectures(makes_sound=not makes_sound):
        return "kind", _wrong_kind(subject, not makes_sound)
    return "kind", (
        f"{subject} is none that generates {'sound' if makes_sound else 'tokens'} here; if it is a "
        "text encoder, use kind: encoder; omni list architectures shows all others"
    )


def _wrong_kind(subject: str, makes_sound: bool) -> str:
    if makes_sound:
        return f"{subject} makes sound of codes; use kind: generator"
    return f"{subject} generates tokens; use kind: autoregressive"
