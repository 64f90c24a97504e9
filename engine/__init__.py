"""Engine for one model: engine loop, scheduler, model runner, attention, models, sampling.

Imports prefix_cache. Engines are imported on first use: importing torch and transformers takes
seconds, which code that only needs prompts and settings should not pay for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from engine.interface.config import EngineConfig as EngineConfig
from engine.interface.config import GenerationParams as GenerationParams
from engine.interface.config import GeneratorConfig as GeneratorConfig
from engine.interface.config import GeneratorSettings as GeneratorSettings
from engine.interface.config import StreamWindow as StreamWindow
from engine.interface.cpu_threads import configure_openmp
from engine.interface.engine import Engine as Engine
from engine.interface.outputs import CompletionOutput as CompletionOutput
from engine.interface.outputs import EncoderOutput as EncoderOutput
from engine.interface.outputs import EngineStats as EngineStats
from engine.interface.outputs import FinishReason as FinishReason
from engine.interface.outputs import GeneratorOutput as GeneratorOutput
from engine.interface.outputs import RequestMetrics as RequestMetrics
from engine.interface.outputs import RequestOutput as RequestOutput
from engine.interface.outputs import TimedWord as TimedWord
from engine.interface.outputs import TokenLogprobs as TokenLogprobs
from engine.interface.outputs import TranscriptionWindow as TranscriptionWindow
from engine.interface.outputs import Waveform as Waveform
from engine.interface.prompts import AudioPrompt as AudioPrompt
from engine.interface.prompts import AudioTask as AudioTask
from engine.interface.prompts import ChatPrompt as ChatPrompt
from engine.interface.prompts import CodecPrompt as CodecPrompt
from engine.interface.prompts import DecoderPrompt as DecoderPrompt
from engine.interface.prompts import EmbedsPrompt as EmbedsPrompt
from engine.interface.prompts import EncoderPrompt as EncoderPrompt
from engine.interface.prompts import ExplicitEncoderDecoderPrompt as ExplicitEncoderDecoderPrompt
from engine.interface.prompts import ImagePrompt as ImagePrompt
from engine.interface.prompts import MultiModalData as MultiModalData
from engine.interface.prompts import Prompt as Prompt
from engine.interface.prompts import SpeechPrompt as SpeechPrompt
from engine.interface.prompts import TextChunk as TextChunk
from engine.interface.prompts import TextPrompt as TextPrompt
from engine.interface.prompts import TokensPrompt as TokensPrompt
from engine.interface.prompts import TranscriptionOptions as TranscriptionOptions
from engine.interface.prompts import VideoFeatures as VideoFeatures
from engine.interface.prompts import VideoPrompt as VideoPrompt
from engine.interface.sampling_params import SamplingParams as SamplingParams
from engine.interface.structured_output import StructuredOutput as StructuredOutput

if TYPE_CHECKING:
    from engine.checkpoints.checkpoint import Checkpoint as Checkpoint
    from engine.checkpoints.checkpoint import CheckpointPart as CheckpointPart
    from engine.encoder.encoder_engine import EncoderEngine as EncoderEngine
    from engine.generator.generator_engine import GeneratorEngine as GeneratorEngine
    from engine.inputs.multimodal_inputs import (
        MultiModalPromptProcessor as MultiModalPromptProcessor,
    )
    from engine.inputs.prompt_processor import PromptContent as PromptContent
    from engine.inputs.prompt_processor import PromptProcessor as PromptProcessor
    from engine.inputs.prompt_processor import PromptSources as PromptSources
    from engine.llm.llm_engine import LLMEngine as LLMEngine
    from engine.models.base import CausalModel as CausalModel
    from engine.models.base import CodeChunk as CodeChunk
    from engine.models.base import GeneratorModel as GeneratorModel
    from engine.models.base import ModelSettings as ModelSettings
    from engine.models.decoders.decoder import DecoderConfig as DecoderConfig
    from engine.models.decoders.decoder import LayerKind as LayerKind
    from engine.models.decoders.decoder import build_decoder as build_decoder
    from engine.models.decoders.decoder import decoder_family as decoder_family
    from engine.models.family import ModelFamily as ModelFamily
    from engine.models.multimodal import ItemTower as ItemTower
    from engine.models.multimodal import MultiModalModel as MultiModalModel
    from engine.models.registry import register_model_family as register_model_family
    from engine.requests.encoder_input import Modality as Modality
    from engine.requests.encoder_input import MultiModalInput as MultiModalInput
    from engine.resources.memory_plan import MemoryPlan as MemoryPlan

# PyTorch's OpenMP reads its settings when it is loaded; no import above loads it.
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
    return sorted({*globals(), *_IMPORTED_ON_USE})
