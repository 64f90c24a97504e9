"""Stage kinds, and the transforms between stages.

The kinds are imported when they are first used, since their engines take seconds to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stages.stage import (
    FINAL_OUTPUTS,
    Stage,
    StageInputs,
    StageOutput,
    StageRequest,
    StageStats,
    Transform,
    TransformContext,
)
from stages.transforms.qwen2_5_omni import talker_to_code2wav, thinker_to_talker
from stages.transforms.registry import (
    chunkable,
    hidden_states_as_prompt_embeds,
    register_transform,
    registered_transforms,
    resolve_transform,
    takes_chunks,
    text_as_prompt,
    token_ids_as_prompt,
)

if TYPE_CHECKING:
    from stages.autoregressive import AutoregressiveStage
    from stages.encoder import EncoderStage
    from stages.generator import GeneratorStage

__all__ = [
    "FINAL_OUTPUTS",
    "AutoregressiveStage",
    "EncoderStage",
    "GeneratorStage",
    "Stage",
    "StageInputs",
    "StageOutput",
    "StageRequest",
    "StageStats",
    "Transform",
    "TransformContext",
    "chunkable",
    "hidden_states_as_prompt_embeds",
    "register_transform",
    "registered_transforms",
    "resolve_transform",
    "takes_chunks",
    "talker_to_code2wav",
    "text_as_prompt",
    "thinker_to_talker",
    "token_ids_as_prompt",
]

_IMPORTED_ON_USE = {
    "AutoregressiveStage": "stages.autoregressive",
    "EncoderStage": "stages.encoder",
    "GeneratorStage": "stages.generator",
}


def __getattr__(name: str) -> Any:
    if name not in _IMPORTED_ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_IMPORTED_ON_USE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
