"""The three kinds of engine, each small, with a prompt for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine import (
    CodecPrompt,
    EncoderEngine,
    Engine,
    EngineConfig,
    GenerationParams,
    GeneratorConfig,
    GeneratorEngine,
    LLMEngine,
    Prompt,
    TokensPrompt,
)

KINDS = ("llm", "encoder", "generator")
LIMITS: dict[str, Any] = {"num_blocks": 32, "block_size": 4, "max_model_len": 64}
TOKENS = TokensPrompt(tuple(range(30, 43)))


def build_engine(kind: str, seeded: Callable[[str], str]) -> tuple[Engine[Any], Prompt]:
    """Return an engine of that kind, and a prompt for it."""
    if kind == "llm":
        return LLMEngine(EngineConfig(model=seeded("qwen2"), **LIMITS)), TOKENS
    if kind == "encoder":
        return EncoderEngine(EngineConfig(model=seeded("bert"), **LIMITS)), TOKENS
    params = GenerationParams(num_steps=2)
    config = GeneratorConfig(
        model=seeded("qwen2_5_omni"), part="code2wav", device="cpu", generation=params
    )
    return GeneratorEngine(config), CodecPrompt((1, 2, 3), "Ethan")
