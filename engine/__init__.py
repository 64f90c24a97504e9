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
    TokenLogprobs,
    Waveform,
    WindowStart,
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
    "TokenLogprobs",
    "TokensPrompt",
    "VideoFeatures",
    "VideoPrompt",
    "Waveform",
    "WindowStart",
    "build_decoder",
    "decoder_family",
    "register_model_family",
]

# PyTorch's OpenMP reads its settings when it is loaded, which no import above does.
configure_openmp()

_IMPORTED_ON_USE = {
    "CausalModel": "engine.models.base",
    "Checkpoint": "engine.checkpoints.checkpoint",
    "CheckpointPart": "engine.checkpoints.checkpoint",
    "CodeChunk": "engine.models.base",
    "DecoderConfig": "engine.models.decoders.decoder",
    "EncoderEngine": "engine.encoder.encoder_engine",
    "GeneratorEngine": "engine.generator.generator_engine",
    "GeneratorModel": "engine.models.base",
    "ItemTower": "engine.models.multimodal",
    "LayerKind": "engine.models.decoders.decoder",
    "LLMEngine": "engine.llm.llm_engine",
    "MemoryPlan": "engine.resources.memory_plan",
    "ModelFamily": "engine.models.family",
    "ModelSettings": "engine.models.base",
    "Modality": "engine.requests.encoder_input",
    "MultiModalInput": "engine.requests.encoder_input",
    "MultiModalModel": "engine.models.multimodal",
    "MultiModalPromptProcessor": "engine.inputs.multimodal_inputs",
    "PromptContent": "engine.inputs.prompt_processor",
    "PromptProcessor": "engine.inputs.prompt_processor",
    "PromptSources": "engine.inputs.prompt_processor",
    "build_decoder": "engine.models.decoders.decoder",
    "decoder_family": "engine.models.decoders.decoder",
    "register_model_family": "engine.models.registry",
}


def __getattr__(name: str) -> Any:
    if name not in _IMPORTED_ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_IMPORTED_ON_USE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
