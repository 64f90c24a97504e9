"""Runs one model: engine loop, scheduler, model runner, attention, models, sampling.

Imports prefix_cache. Engines are imported when they are first used, since that takes seconds of
torch and transformers, which naming prompts and settings should not cost.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from engine.interface.config import (
    EngineConfig,
    GenerationParams,
    GeneratorConfig,
    GeneratorSettings,
    StreamWindow,
)
from engine.interface.cpu_threads import configure_openmp
from engine.interface.engine import Engine
from engine.interface.outputs import (
    CompletionOutput,
    EncoderOutput,
    EngineStats,
    FinishReason,
    GeneratorOutput,
    RequestMetrics,
    RequestOutput,
    TimedWord,
    TokenLogprobs,
    TranscriptionWindow,
    Waveform,
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
    TextChunk,
    TextPrompt,
    TokensPrompt,
    TranscriptionOptions,
    VideoFeatures,
    VideoPrompt,
)
from engine.interface.sampling_params import SamplingParams
from engine.interface.structured_output import StructuredOutput

if TYPE_CHECKING:
    from engine.checkpoints.checkpoint import Checkpoint, CheckpointPart
    from engine.encoder.encoder_engine import EncoderEngine
    from engine.generator.generator_engine import GeneratorEngine
    from engine.inputs.multimodal_inputs import MultiModalPromptProcessor
    from engine.inputs.prompt_processor import PromptContent, PromptProcessor, PromptSources
    from engine.llm.llm_engine import LLMEngine
    from engine.models.base import CausalModel, CodeChunk, GeneratorModel, ModelSettings
    from engine.models.decoders.decoder import (
        DecoderConfig,
        LayerKind,
        build_decoder,
        decoder_family,
    )
    from engine.models.family import ModelFamily
    from engine.models.multimodal import ItemTower, MultiModalModel
    from engine.models.registry import register_model_family
    from engine.requests.encoder_input import Modality, MultiModalInput
    from engine.resources.memory_plan import MemoryPlan

__all__ = [
    "AudioPrompt",
    "AudioTask",
    "CausalModel",
    "ChatPrompt",
    "Checkpoint",
    "CheckpointPart",
    "CodeChunk",
    "CodecPrompt",
    "CompletionOutput",
    "DecoderConfig",
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
    "GeneratorModel",
    "GeneratorOutput",
    "GeneratorSettings",
    "ImagePrompt",
    "ItemTower",
    "LLMEngine",
    "LayerKind",
    "MemoryPlan",
    "Modality",
    "ModelFamily",
    "ModelSettings",
    "MultiModalData",
    "MultiModalInput",
    "MultiModalModel",
    "MultiModalPromptProcessor",
    "Prompt",
    "PromptContent",
    "PromptProcessor",
    "PromptSources",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SpeechPrompt",
    "StreamWindow",
    "StructuredOutput",
    "TextChunk",
    "TextPrompt",
    "TimedWord",
    "TokenLogprobs",
    "TokensPrompt",
    "TranscriptionOptions",
    "TranscriptionWindow",
    "VideoFeatures",
    "VideoPrompt",
    "Waveform",
    "build_decoder",
    "decoder_family",
    "register_model_family",
]

# PyTorch's OpenMP reads its settings when it is loaded, which no import above does.
configure_openmp()

_IMPORTED_ON_USE = {
    name: f"engine.{module}"
    for module, names in {
        "checkpoints.checkpoint": ("Checkpoint", "CheckpointPart"),
        "encoder.encoder_engine": ("EncoderEngine",),
        "generator.generator_engine": ("GeneratorEngine",),
        "inputs.multimodal_inputs": ("MultiModalPromptProcessor",),
        "inputs.prompt_processor": ("PromptContent", "PromptProcessor", "PromptSources"),
        "llm.llm_engine": ("LLMEngine",),
        "models.base": ("CausalModel", "CodeChunk", "GeneratorModel", "ModelSettings"),
        "models.decoders.decoder": (
            *("DecoderConfig", "LayerKind", "build_decoder", "decoder_family"),
        ),
        "models.family": ("ModelFamily",),
        "models.multimodal": ("ItemTower", "MultiModalModel"),
        "models.registry": ("register_model_family",),
        "requests.encoder_input": ("Modality", "MultiModalInput"),
        "resources.memory_plan": ("MemoryPlan",),
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    if name not in _IMPORTED_ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_IMPORTED_ON_USE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
