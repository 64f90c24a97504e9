"""Runs one model: engine loop, scheduler, model runner, attention, models, sampling.

Engines are imported when they are first used, since that takes seconds of torch and transformers,
for which nobody should wait who only names prompts and settings.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.generator_config import (
    GenerationParams,
    GeneratorConfig,
    GeneratorSettings,
    StreamWindow,
)
from engine.outputs import (
    CompletionOutput,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from engine.prompts import (
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
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine.encoder_engine import EncoderEngine
    from engine.encoder_request import EncoderOutput
    from engine.generator_engine import GeneratorEngine
    from engine.generator_request import GeneratorOutput
    from engine.llm_engine import LLMEngine
    from engine.memory_plan import MemoryPlan
    from engine.stats import EngineStats
    from engine.waveform import Waveform

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
    "EncoderEngine": "engine.encoder_engine",
    "EncoderOutput": "engine.encoder_request",
    "EngineStats": "engine.stats",
    "GeneratorEngine": "engine.generator_engine",
    "GeneratorOutput": "engine.generator_request",
    "LLMEngine": "engine.llm_engine",
    "MemoryPlan": "engine.memory_plan",
    "Waveform": "engine.waveform",
}


def __getattr__(name: str) -> Any:
    if name not in _IMPORTED_ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_IMPORTED_ON_USE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
