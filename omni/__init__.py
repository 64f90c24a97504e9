"""The public API: pipelines of stages, in YAML and in Python.

Imports every other package. Names are imported lazily, on first use, so that ``omni --help``
does not wait for torch.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine import AudioPrompt as AudioPrompt
    from engine import ChatPrompt as ChatPrompt
    from engine import EmbedsPrompt as EmbedsPrompt
    from engine import EngineConfig as EngineConfig
    from engine import ExplicitEncoderDecoderPrompt as ExplicitEncoderDecoderPrompt
    from engine import GeneratorConfig as GeneratorConfig
    from engine import ImagePrompt as ImagePrompt
    from engine import LLMEngine as LLMEngine
    from engine import Prompt as Prompt
    from engine import SamplingParams as SamplingParams
    from engine import StructuredOutput as StructuredOutput
    from engine import TextChunk as TextChunk
    from engine import TextPrompt as TextPrompt
    from engine import TokensPrompt as TokensPrompt
    from engine import TranscriptionOptions as TranscriptionOptions
    from engine import VideoPrompt as VideoPrompt
    from engine import Waveform as Waveform
    from omni.pipelines.pipeline import Pipeline as Pipeline
    from omni.pipelines.pipeline_config import PipelineConfig as PipelineConfig
    from omni.pipelines.voices import RecordedVoice as RecordedVoice
    from omni.requests.request import OmniOutput as OmniOutput
    from omni.requests.request import OmniRequest as OmniRequest
    from omni.runtime.omni import Omni as Omni
    from omni.verification.verify import verify as verify
    from stages import AutoregressiveStage as AutoregressiveStage
    from stages import Completion as Completion
    from stages import EncoderStage as EncoderStage
    from stages import GeneratorStage as GeneratorStage
    from stages import Stage as Stage
    from stages import StageConfig as StageConfig
    from stages import StageInputs as StageInputs
    from stages import StageOutput as StageOutput
    from stages import TransformContext as TransformContext
    from stages import chunkable as chunkable
    from stages import register_stage_kind as register_stage_kind
    from stages import register_transform as register_transform
    from stages import requires as requires


_IMPORTED_ON_USE = {
    name: module
    for module, names in {
        "engine": (
            *("AudioPrompt", "ChatPrompt", "EmbedsPrompt", "ExplicitEncoderDecoderPrompt"),
            *("ImagePrompt", "Prompt", "TextChunk", "TextPrompt", "TokensPrompt", "VideoPrompt"),
            *("EngineConfig", "GeneratorConfig", "LLMEngine", "SamplingParams"),
            *("StructuredOutput", "TranscriptionOptions", "Waveform"),
        ),
        "omni.pipelines.pipeline": ("Pipeline",),
        "omni.pipelines.pipeline_config": ("PipelineConfig",),
        "omni.pipelines.voices": ("RecordedVoice",),
        "omni.requests.request": ("OmniOutput", "OmniRequest"),
        "omni.runtime.omni": ("Omni",),
        "omni.verification.verify": ("verify",),
        "stages": (
            *("AutoregressiveStage", "EncoderStage", "GeneratorStage", "Stage", "StageConfig"),
            *("Completion", "StageInputs", "StageOutput", "TransformContext", "chunkable"),
            *("register_stage_kind", "register_transform", "requires"),
        ),
    }.items()
    for name in names
}
__all__ = list(_IMPORTED_ON_USE)


def __getattr__(name: str) -> Any:
    if name not in _IMPORTED_ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Not earlier: the command line first removes the working directory from the import path.
    _check_packages()
    return getattr(importlib.import_module(_IMPORTED_ON_USE[name]), name)


@cache
def _check_packages() -> None:
    """Check that the sibling packages are not shadowed, for example by a user's script."""
    root = Path(__file__).resolve().parents[1]
    for name in ("engine", "prefix_cache", "stages", "stage_configs"):
        try:
            spec = find_spec(name)
        except ValueError:  # a loaded module without a __spec__
            continue
        found = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
        if found is not None and root not in found.parents:
            raise ImportError(
                f"omni needs its package {name!r}, which {found} hides: rename that module, or "
                "take its folder off the import path (sys.path)"
            )


def __dir__() -> list[str]:
    return sorted({*globals(), *_IMPORTED_ON_USE})
