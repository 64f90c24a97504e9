"""The user's door: pipelines of stages, in YAML and in Python.

Imports every other package. Names are imported when they are first used, so that ``omni --help``
need not wait for torch.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path
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
        # Not before: the command line takes the working directory off the import path first.
        _check_packages()
        for home in map(importlib.import_module, _HOMES):
            if hasattr(home, name):
                return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _check_packages() -> None:
    """Check that the packages beside this one are what their names import, such as no script."""
    root = Path(__file__).resolve().parents[1]
    for name in ("engine", "prefix_cache", "stages", "stage_configs"):
        try:
            spec = find_spec(name)
        except ValueError:  # of a module that says nothing of where it comes from
            continue
        found = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
        if found is not None and root not in found.parents:
            raise ImportError(
                f"omni needs its package {name!r}, which {found} hides: rename that module, or "
                "take its folder off the import path (sys.path)"
            )


def __dir__() -> list[str]:
    return sorted(__all__)
