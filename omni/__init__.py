"""The user's door: pipelines of stages, in YAML and in Python.

Imports every other package. Names are imported when they are first used, so that ``omni --help``
need not wait for torch.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
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
        StructuredOutput,
        TextChunk,
        TextPrompt,
        TokensPrompt,
        VideoPrompt,
        Waveform,
    )
    from omni.pipelines.pipeline import Pipeline
    from omni.pipelines.pipeline_config import PipelineConfig
    from omni.requests.request import OmniOutput, OmniRequest
    from omni.runtime.omni import Omni
    from omni.verification.verify import verify
    from stages import (
        AutoregressiveStage,
        Completion,
        EncoderStage,
        GeneratorStage,
        Stage,
        StageConfig,
        StageInputs,
        StageOutput,
        TransformContext,
        chunkable,
        register_stage_kind,
        register_transform,
        requires,
    )

__all__ = [
    "AudioPrompt",
    "AutoregressiveStage",
    "ChatPrompt",
    "Completion",
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
    "StageConfig",
    "StageInputs",
    "StageOutput",
    "StructuredOutput",
    "TextChunk",
    "TextPrompt",
    "TokensPrompt",
    "TransformContext",
    "VideoPrompt",
    "Waveform",
    "chunkable",
    "register_stage_kind",
    "register_transform",
    "requires",
    "verify",
]

# In this order: the first two cost the least.
_HOMES = (
    "engine",
    "stages",
    "omni.requests.request",
    "omni.pipelines.pipeline_config",
    "omni.pipelines.pipeline",
    "omni.runtime.omni",
    "omni.verification.verify",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in map(_imported, _HOMES):
            if hasattr(home, name):
                return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _imported(home: str) -> ModuleType:
    """Import a module of ours; of a module in the place of one of our packages, say which it is."""
    try:
        return importlib.import_module(home)
    except ImportError as error:
        for name in ("engine", "prefix_cache", "stages", "stage_configs"):
            found = getattr(sys.modules.get(name), "__file__", None)
            if found is not None and not Path(found).is_relative_to(Path(__file__).parents[1]):
                raise ImportError(
                    f"omni needs its package {name!r}, which {found} hides: rename that module, or "
                    "take its folder off the import path (sys.path)"
                ) from error
        raise


def __dir__() -> list[str]:
    return sorted(__all__)
