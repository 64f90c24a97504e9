"""Runs one model: engine loop, scheduler, model runner, attention, models, sampling.

Engines are imported when they are first used, since that takes seconds of torch and transformers,
for which nobody should wait who only names prompts and settings.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
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
    DecoderPrompt,
    EmbedsPrompt,
    EncoderPrompt,
    ExplicitEncoderDecoderPrompt,
    ImagePrompt,
    MultiModalData,
    Prompt,
    TextPrompt,
    TokensPrompt,
)
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine.encoder_engine import EncoderEngine
    from engine.encoder_request import EncoderOutput
    from engine.llm_engine import LLMEngine
    from engine.memory_plan import MemoryPlan
    from engine.stats import EngineStats

__all__ = [
    "AudioPrompt",
    "AudioTask",
    "ChatPrompt",
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
    "ImagePrompt",
    "LLMEngine",
    "MemoryPlan",
    "MultiModalData",
    "Prompt",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokenLogprobs",
    "TokensPrompt",
]

_IMPORTED_ON_USE = {
    "EncoderEngine": "engine.encoder_engine",
    "EncoderOutput": "engine.encoder_request",
    "EngineStats": "engine.stats",
    "LLMEngine": "engine.llm_engine",
    "MemoryPlan": "engine.memory_plan",
}


def __getattr__(name: str) -> Any:
    if name not in _IMPORTED_ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_IMPORTED_ON_USE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
