"""Checkpoints that hold several models, each of which a stage of its own runs.

::

    Qwen2.5-Omni     config.json          weights
    thinker          thinker_config       thinker.model.layers.0...   text from text, image, sound
    talker           talker_config        talker.model.layers.0...    codec tokens from the thinker
    code2wav         token2wav_config     token2wav.code2wav_dit...   waveform from codec tokens
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedConfig

__all__ = ["CheckpointPart", "find_part"]


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """One model of several in a checkpoint.

    Attributes:
        name: by which users ask for it.
        config_name: its config's attribute in the whole config.
        prefix: of its weights' names.
        architecture: transformers' class for it; published configs name older ones.
        has_generation_config: whether ``generation_config.json`` is about this part.
    """

    name: str
    config_name: str
    prefix: str
    architecture: str
    has_generation_config: bool = False


_PARTS: Mapping[str, tuple[CheckpointPart, ...]] = {
    "qwen2_5_omni": (
        CheckpointPart(
            "thinker",
            "thinker_config",
            "thinker.",
            "Qwen2_5OmniThinkerForConditionalGeneration",
            has_generation_config=True,
        ),
        CheckpointPart(
            "talker", "talker_config", "talker.", "Qwen2_5OmniTalkerForConditionalGeneration"
        ),
        CheckpointPart("code2wav", "token2wav_config", "token2wav.", "Qwen2_5OmniToken2WavModel"),
    ),
}


def find_part(config: PreTrainedConfig, name: str | None, path: Path) -> CheckpointPart | None:
    """The part of a checkpoint that a user asks for; None if it is one model and none is asked for.

    Args:
        config: of the whole.
        name: of the part.
        path: the checkpoint's, for messages.

    Raises:
        ValueError: there are several models and none was named, or there is none of that name.
    """
    parts = {part.name: part for part in _PARTS.get(config.model_type, ())}
    if not parts:
        if name is not None:
            raise ValueError(f"{path} is one model without parts; got part={name!r}, leave it out")
        return None
    if name is None:
        raise ValueError(f"{path} holds several models; say by part which: {', '.join(parts)}")
    if name not in parts:
        close = difflib.get_close_matches(name, parts, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{path} has no part {name!r}, but {', '.join(parts)}{hint}")
    return parts[name]
