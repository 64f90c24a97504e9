"""Runs one model: engine loop, scheduler, model runner, attention, models, sampling.

Engines are imported when they are first used, since that takes seconds of torch and transformers,
for which a caller who only names prompts and settings should not wait.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from engine.interface.config import EngineConfig
from engine.interface.engine import Engine
from engine.interface.generator_config import (
    GenerationParams,
    GeneratorConfig,
    GeneratorSettings,
    StreamWindow,
)
from engine.interface.outputs import (
    CompletionOutput,
    EncoderOutput,
    FinishReason,
    GeneratorOutput,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from engine.interface.prompts import (
    AudioPrompt,
    AudioTask,
    ChatPrompt,
    CodecPrompt,
    DecoderPrompt,
    EmbedsPrompt,
    EncoderPrompt,
    ExplicitEncoderDecoderPrompt,
    ImagePrompt,
    MultiModalData,
    Prompt,
    SpeechPrompt,
    TextPrompt,
    TokensPrompt,
    VideoFeatures,
)
from engine.interface.sampling_params import SamplingParams
from engine.interface.stats import EngineStats
from engine.interface.waveform import Waveform

if TYPE_CHECKING:
    from engine.encoder.encoder_engine import EncoderEngine
    from engine.generator.generator_engine import GeneratorEngine
    from engine.llm.llm_engine import LLMEngine
    from engine.resources.memory_plan import MemoryPlan

__all__ = [
    "AudioPrompt",
    "AudioTask",
    "ChatPrompt",
    "CodecPrompt",
    "CompletionOutput",
    "DecoderPrompt",
    "EmbedsPrompt",
    "EncoderEngine",
    "EncoderOutput",
    "EncoderPrompt",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "ExplicitEncoderDecoderPrompt",
    "FinishReason",
    "GenerationParams",
    "GeneratorConfig",
    "GeneratorEngine",
    "GeneratorOutput",
    "GeneratorSettings",
    "ImagePrompt",
    "LLMEngine",
    "MemoryPlan",
    "MultiModalData",
    "Prompt",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SpeechPrompt",
    "StreamWindow",
    "TextPrompt",
    "TokenLogprobs",
    "TokensPrompt",
    "VideoFeatures",
    "Waveform",
]

_IMPORTED_ON_USE = {
    "EncoderEngine": "engine.encoder.encoder_engine",
    "GeneratorEngine": "engine.generator.generator_engine",
    "LLMEngine": "engine.llm.llm_engine",
    "MemoryPlan": "engine.resources.memory_plan",
}


def __getattr__(name: str) -> Any:
    if name not in _IMPORTED_ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_IMPORTED_ON_USE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
