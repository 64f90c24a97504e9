"""Stage kinds, and the transforms between stages."""

from stages.autoregressive import AutoregressiveStage
from stages.encoder import EncoderStage
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
from stages.transforms import (
    hidden_states_as_prompt_embeds,
    register_transform,
    registered_transforms,
    resolve_transform,
    text_as_prompt,
    token_ids_as_prompt,
)

__all__ = [
    "FINAL_OUTPUTS",
    "AutoregressiveStage",
    "EncoderStage",
    "Stage",
    "StageInputs",
    "StageOutput",
    "StageRequest",
    "StageStats",
    "Transform",
    "TransformContext",
    "hidden_states_as_prompt_embeds",
    "register_transform",
    "registered_transforms",
    "resolve_transform",
    "text_as_prompt",
    "token_ids_as_prompt",
]
