"""The user's door: pipelines of stages, in YAML and in Python.

Names are imported when they are first used, so that ``omni --help`` need not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine import (
        AudioPrompt,
        ChatPrompt,
        EmbedsPrompt,
        EngineConfig,
        ExplicitEncoderDecoderPrompt,
        GeneratorConfig,
        ImagePrompt,
        LLMEngine,
        Prompt,
        SamplingParams,
        TextPrompt,
        TokensPrompt,
        Waveform,
    )
    from omni.pipelines.pipeline import Pipeline
    from omni.pipelines.pipeline_config import PipelineConfig
    from omni.requests.request import OmniOutput, OmniRequest
    from omni.runtime.omni import Omni
    from stages import (
        AutoregressiveStage,
        EncoderStage,
        GeneratorStage,
        Stage,
        StageInputs,
        StageOutput,
        TransformContext,
        chunkable,
        register_transform,
    )

__all__ = [
    "AudioPrompt",
    "AutoregressiveStage",
    "ChatPrompt",
    "EmbedsPrompt",
    "EncoderStage",
    "EngineConfig",
    "ExplicitEncoderDecoderPrompt",
    "GeneratorConfig",
    "GeneratorStage",
    "ImagePrompt",
    "LLMEngine",
    "Omni",
    "OmniOutput",
    "OmniRequest",
    "Pipeline",
    "PipelineConfig",
    "Prompt",
    "SamplingParams",
    "Stage",
    "StageInputs",
    "StageOutput",
    "TextPrompt",
    "TokensPrompt",
    "TransformContext",
    "Waveform",
    "chunkable",
    "register_transform",
]

_HOMES = {
    "engine": (
        "AudioPrompt",
        "ChatPrompt",
        "EmbedsPrompt",
        "EngineConfig",
        "ExplicitEncoderDecoderPrompt",
        "GeneratorConfig",
        "ImagePrompt",
        "LLMEngine",
        "Prompt",
        "SamplingParams",
        "TextPrompt",
        "TokensPrompt",
        "Waveform",
    ),
    "omni.runtime.omni": ("Omni",),
    "omni.pipelines.pipeline": ("Pipeline",),
    "omni.pipelines.pipeline_config": ("PipelineConfig",),
    "omni.requests.request": ("OmniOutput", "OmniRequest"),
    "stages": (
        "AutoregressiveStage",
        "EncoderStage",
        "GeneratorStage",
        "Stage",
        "StageInputs",
        "StageOutput",
        "TransformContext",
        "chunkable",
        "register_transform",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
