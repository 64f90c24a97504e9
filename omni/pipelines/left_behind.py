"""What a pipeline says for its own runtime, and the one that it is to run in does not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from engine.interface.log_fields import package_logger
from stages.placement import Placement, RuntimeKind

__all__ = ["leave_behind", "placement_for", "runtime_for", "tell"]

_LOG = package_logger(__name__)
_KINDS = get_args(RuntimeKind)
_OF_A_CLUSTER = ("address", "tensor_transport")


def leave_behind(data: dict[str, Any], overrides: Mapping[str, Any]) -> list[str]:
    """Take out of a file what the runtime does not have that is given in place of the file's own.

    So the same file runs everywhere. Where no other runtime is given, what the file says stays, and
    is refused if the file's own runtime does not have it. What comes by an override is refused
    likewise: to ask for replicas and for the inline runtime at once is a contradiction.

    Args:
        data: of the file, before anything is replaced; changed in place.
        overrides: values by dotted place, which replace the file's.

    Returns:
        What is left out, for :func:`tell`, if nothing else is wrong.
    """
    kind = _kind_in(overrides)
    if kind not in _KINDS:
        return []
    left = runtime_for(data.get("runtime"), kind)
    stages = data.get("stages")
    for name, stage in stages.items() if isinstance(stages, dict) else ():
        if isinstance(stage, dict):
            left += _drop_of_placement(name, stage.get("placement"), kind)
    return left


def runtime_for(settings: Any, kind: str) -> list[str]:
    """Take out of the settings of a runtime what one of another kind does not have.

    Args:
        settings: changed in place; what is no mapping is left for the validation to refuse.
        kind: of the runtime that takes its place; an unknown one is left for the validation, too.

    Returns:
        What is left out, for :func:`tell`.
    """
    if kind == "ray" or kind not in _KINDS:
        return []
    return _drop(settings, _OF_A_CLUSTER, "runtime", kind)


def placement_for(name: str, placement: Placement, kind: RuntimeKind) -> Placement:
    """Where a stage of a pipeline that has been read runs in a runtime given in its own's place.

    Args:
        name: of the stage.
        placement: as the pipeline says.
        kind: of the runtime.

    Returns:
        The placement without what the runtime does not have, of which a warning tells.
    """
    settings = placement.model_dump(exclude_defaults=True)
    left = _drop_of_placement(name, settings, kind)
    tell(left)
    return Placement(**settings) if left else placement


def tell(left: list[str]) -> None:
    """Warn of what was left out."""
    for each in left:
        _LOG.warning("%s", each)


def _kind_in(overrides: Mapping[str, Any]) -> Any:
    """The kind of runtime that overrides give; None where they leave it to the file."""
    kind: Any = None
    for place, value in overrides.items():
        if place == "runtime.kind":
            kind = value
        elif place == "runtime" and isinstance(value, dict):
            kind = value.get("kind", "inline")
    return kind


def _drop_of_placement(name: str, settings: Any, kind: RuntimeKind) -> list[str]:
    keys = Placement.not_of(kind)
    devices = settings.get("devices") if isinstance(settings, dict) else None
    if isinstance(devices, list | tuple) and len(devices) == 1:
        keys = tuple(key for key in keys if key != "devices")  # one worker has one everywhere
    return _drop(settings, keys, f"stages.{name}.placement", kind)


def _drop(settings: Any, keys: Sequence[str], place: str, kind: str) -> list[str]:
    if not isinstance(settings, dict):
        return []
    return [
        f"{place}.{key}: {settings.pop(key)} is not for runtime {kind}; left out"
        for key in keys
        if key in settings
    ]
