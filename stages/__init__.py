"""Stage kinds, and the transforms between stages.

Imports engine. Engine classes are imported when a stage is built, since that takes seconds.
"""

from __future__ import annotations

from stages.autoregressive import AutoregressiveStage as AutoregressiveStage
from stages.autoregressive import AutoregressiveStageConfig as AutoregressiveStageConfig
from stages.encoder import EncoderStage as EncoderStage
from stages.encoder import EncoderStageConfig as EncoderStageConfig
from stages.generator import GeneratorStage as GeneratorStage
from stages.generator import GeneratorStageConfig as GeneratorStageConfig
from stages.stage import FINAL_OUTPUTS as FINAL_OUTPUTS
from stages.stage import Prepared as Prepared
from stages.stage import Stage as Stage
from stages.stage import StageInputs as StageInputs
from stages.stage import StageRequest as StageRequest
from stages.stage import StageStats as StageStats
from stages.stage import Transform as Transform
from stages.stage import TransformContext as TransformContext
from stages.stage_config import ModelReference as ModelReference
from stages.stage_config import StageConfig as StageConfig
from stages.stage_config import register_stage_kind as register_stage_kind
from stages.stage_output import Completion as Completion
from stages.stage_output import StageOutput as StageOutput
from stages.transforms.prompts import (
    hidden_states_as_prompt_embeds as hidden_states_as_prompt_embeds,
)
from stages.transforms.prompts import text_as_prompt as text_as_prompt
from stages.transforms.prompts import token_ids_as_prompt as token_ids_as_prompt
from stages.transforms.registry import chunkable as chunkable
from stages.transforms.registry import register_transform as register_transform
from stages.transforms.registry import registered_transforms as registered_transforms
from stages.transforms.registry import requires as requires
from stages.transforms.registry import resolve_transform as resolve_transform
from stages.transforms.registry import takes_chunks as takes_chunks
from stages.transforms.speech import talker_to_code2wav as talker_to_code2wav
from stages.transforms.speech import thinker_to_talker as thinker_to_talker
