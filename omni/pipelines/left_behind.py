"""What a pipeline's file says for its own runtime, and another one does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from engine.interface.log_fields import package_logger
from stages.placement import Placement, RuntimeKind

__all__ = ["leave_behind"]

_LOG = package_logger(__name__)
_OF_A_CLUSTER = ("address", "tensor_transport")


def leave_behind(data: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Take out of a file what is not for the runtime that somebody gives in place of its own.

    So the same file runs everywhere. What a file says for its *own* runtime stays, and is refused
    where that does not have it, and so is what comes by an override itself.

    Args:
        data: of the file, before anything is replaced; changed in place.
        overrides: values by dotted place, which replace the file's.
    """
    kind: Any = overrides.get("runtime.kind")
    runtime = data.get("runtime")
    own = runtime.get("kind", "inline") if isinstance(runtime, dict) else "inline"
    if kind not in get_args(RuntimeKind) or kind == own:
        return
    if kind != "ray":
        _drop(runtime, _OF_A_CLUSTER, "runtime", kind)
    stages = data.get("stages")
    for name, stage in stages.items() if isinstance(stages, dict) else ():
        if isinstance(stage, dict):
            where = f"stages.{name}.placement"
            _drop(stage.get("placement"), Placement.not_of(kind), where, kind)


def _drop(settings: Any, keys: tuple[str, ...], place: str, kind: str) -> None:
    if not isinstance(settings, dict):
        return
    for key in keys:
        if key in settings:
            value = settings.pop(key)
            _LOG.warning("%s.%s: %s is not for runtime %s; left out", place, key, value, kind)
