"""Runs one model: engine loop, scheduler, model runner, attention, models, sampling."""

from engine.config import EngineConfig
from engine.encoder_engine import EncoderEngine, EncoderOutput
from engine.llm_engine import LLMEngine
from engine.memory_plan import MemoryPlan
from engine.outputs import (
    CompletionOutput,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from engine.prompts import ChatPrompt, EmbedsPrompt, Prompt, TextPrompt, TokensPrompt
from engine.sampling_params import SamplingParams
from engine.stats import EngineStats

__all__ = [
    "ChatPrompt",
    "CompletionOutput",
    "EmbedsPrompt",
    "EncoderEngine",
    "EncoderOutput",
    "EngineConfig",
    "EngineStats",
    "FinishReason",
    "LLMEngine",
    "MemoryPlan",
    "Prompt",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokenLogprobs",
    "TokensPrompt",
]
