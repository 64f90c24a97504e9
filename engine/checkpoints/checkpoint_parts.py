"""Checkpoints that hold several models, each of which a stage of its own runs.

::

    config.json              weights
    first_config             first.layers.0...       one part
    second_config            second.layers.0...      another
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CheckpointPart", "find_part"]


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """One model of several in a checkpoint.

    Attributes:
        name: by which users ask for it.
        whole: ``model_type`` of the whole config.
        config_name: its config's attribute in the whole config.
        prefix: of its weights' names.
        architecture: transformers' class for it; published configs name older ones.
        has_generation_config: whether ``generation_config.json`` is about this part.
    """

    name: str
    whole: str
    config_name: str
    prefix: str
    architecture: str
    has_generation_config: bool = False


def find_part(
    parts: Sequence[CheckpointPart], name: str | None, path: Path
) -> CheckpointPart | None:
    """The part of a checkpoint that a user asks for; None if it is one model and none is asked for.

    Args:
        parts: of the whole; none if it is one model.
        name: of the part.
        path: the checkpoint's, for messages.

    Raises:
        ValueError: there are several models and none was named, or there is none of that name.
    """
    by_name = {part.name: part for part in parts}
    if not by_name:
        if name is not None:
            raise ValueError(f"{path} is one model without parts; got part={name!r}, leave it out")
        return None
    if name is None:
        raise ValueError(f"{path} holds several models; say by part which: {', '.join(by_name)}")
    if name not in by_name:
        close = difflib.get_close_matches(name, by_name, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{path} has no part {name!r}, but {', '.join(by_name)}{hint}")
    return by_name[name]
