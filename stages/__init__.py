"""Stage kinds, and the transforms between stages.

Imports engine. Engines are imported when a stage is built, since that takes seconds.
"""

from __future__ import annotations

from stages.autoregressive import AutoregressiveStage, AutoregressiveStageConfig
from stages.encoder import EncoderStage, EncoderStageConfig
from stages.generator import GeneratorStage, GeneratorStageConfig
from stages.stage import (
    FINAL_OUTPUTS,
    Prepared,
    Stage,
    StageInputs,
    StageRequest,
    StageStats,
    Transform,
    TransformContext,
)
from stages.stage_config import ModelReference, StageConfig, register_stage_kind
from stages.stage_output import Completion, StageOutput
from stages.transforms.prompts import (
    hidden_states_as_prompt_embeds,
    text_as_prompt,
    token_ids_as_prompt,
)
from stages.transforms.registry import (
    chunkable,
    register_transform,
    registered_transforms,
    requires,
    resolve_transform,
    takes_chunks,
)
from stages.transforms.speech import talker_to_code2wav, thinker_to_talker

__all__ = [
    "FINAL_OUTPUTS",
    "AutoregressiveStage",
    "AutoregressiveStageConfig",
    "Completion",
    "EncoderStage",
    "EncoderStageConfig",
    "GeneratorStage",
    "GeneratorStageConfig",
    "ModelReference",
    "Prepared",
    "Stage",
    "StageConfig",
    "StageInputs",
    "StageOutput",
    "StageRequest",
    "StageStats",
    "Transform",
    "TransformContext",
    "chunkable",
    "hidden_states_as_prompt_embeds",
    "register_stage_kind",
    "register_transform",
    "registered_transforms",
    "requires",
    "resolve_transform",
    "takes_chunks",
    "talker_to_code2wav",
    "text_as_prompt",
    "thinker_to_talker",
    "token_ids_as_prompt",
]


def __dir__() -> list[str]:
    return sorted(__all__)
