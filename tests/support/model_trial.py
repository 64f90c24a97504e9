"""Loads a seeded checkpoint of any family, intact or corrupted, and runs a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from engine import (
    AudioPrompt,
    ChatPrompt,
    CodecPrompt,
    EncoderEngine,
    Engine,
    EngineConfig,
    GenerationParams,
    GeneratorConfig,
    GeneratorEngine,
    ImagePrompt,
    LLMEngine,
    Prompt,
    SamplingParams,
)
from tests.support.encoder_decoder_requests import tone

_SHOWS = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Where?"}]}


def _picture() -> Prompt:
    return ChatPrompt((_SHOWS,), {"image": [Image.new("RGB", (60, 40), "teal")]})


def _text() -> Prompt:
    return "the quick brown fox"


@dataclass(frozen=True, slots=True)
class Trial:
    """How to try a checkpoint of a family.

    Attributes:
        seeded: the model.
        part: the part of the model, if it holds several.
        prompt: the prompt to run; None runs nothing.
        kind: of its engine.
    """

    seeded: str
    part: str | None = None
    prompt: Callable[[], Prompt] | None = _text
    kind: str = "llm"

    def run(self, folder: str | Path) -> str | None:
        """Load it and run the prompt; return the message of a request that failed alone.

        Raises:
            Exception: any error of building or running the engine.
        """
        engine = self.engine(str(folder))
        try:
            return None if self.prompt is None else _ask(engine, self.prompt())
        finally:
            engine.close()

    def engine(self, model: str, device: str = "cpu", block_size: int = 8) -> Engine[Any]:
        """Build an engine in float32."""
        if self.kind == "generator":
            params = GenerationParams(num_steps=2)
            return GeneratorEngine(
                GeneratorConfig(model=model, part=self.part, device=device, generation=params)
            )
        config = EngineConfig(
            model=model,
            part=self.part,
            device=device,
            dtype="float32",
            num_blocks=64,
            block_size=block_size,
            max_num_seqs=4,
        )
        return EncoderEngine(config) if self.kind == "encoder" else LLMEngine(config)


def _ask(engine: Engine[Any], prompt: Prompt) -> str | None:
    sampling = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0)
    try:
        engine.add_request("x", prompt, sampling if isinstance(engine, LLMEngine) else None)
    except ValueError as refused:
        return str(refused)
    error: str | None = None
    while engine.has_unfinished_requests:
        for output in engine.step():
            error = error or output.error
    return error


TRIALS: Mapping[str, Trial] = {
    **{
        name: Trial(name)
        for name in (
            *("qwen2", "qwen3", "llama", "mistral", "ministral", "gemma2", "gemma3"),
            *("jamba", "bamba", "qwen3_next", "qwen3_5", "bart", "t5", "qwen3_moe", "mixtral"),
        )
    },
    "qwen3_asr": Trial("qwen3_asr", prompt=lambda: AudioPrompt(tone(0.5))),
    "voxtral": Trial("voxtral", prompt=lambda: AudioPrompt(tone(0.5))),
    "whisper": Trial("whisper", prompt=lambda: AudioPrompt(tone(0.5))),
    "mllama": Trial("mllama", prompt=lambda: ImagePrompt(Image.new("RGB", (60, 40), "teal"))),
    "llava": Trial("llava", prompt=_picture),
    "qwen2_5_vl": Trial("qwen2_5_vl", prompt=_picture),
    "qwen3_vl": Trial("qwen3_vl", prompt=_picture),
    "qwen3_5_vision": Trial("qwen3_5_vision", prompt=_picture),
    "thinker": Trial("qwen2_5_omni", "thinker", prompt=_picture),
    "qwen3 thinker": Trial("qwen3_omni", "thinker", prompt=_picture),
    "qwen3 talker": Trial("qwen3_omni", "talker", prompt=None),
    "qwen3 code2wav": Trial(
        "qwen3_omni",
        "code2wav",
        prompt=lambda: CodecPrompt(((1, 2, 3, 4), (5, 6, 7, 8))),
        kind="generator",
    ),
    "csm": Trial("csm", "backbone"),
    "csm mimi": Trial(
        "csm",
        "mimi",
        prompt=lambda: CodecPrompt(((1, 2, 3, 4), (5, 6, 7, 8))),
        kind="generator",
    ),
    "pocket_tts": Trial("pocket_tts"),
    "pocket_tts codec": Trial(
        "pocket_tts_codec", prompt=lambda: CodecPrompt(((0,) * 8,) * 2), kind="generator"
    ),
    "talker": Trial("qwen2_5_omni", "talker", prompt=None),
    "code2wav": Trial(
        "qwen2_5_omni", "code2wav", prompt=lambda: CodecPrompt((1, 2, 3, 4)), kind="generator"
    ),
    "bert": Trial("bert", kind="encoder"),
}
"""Trials by a short name of the family, or of its part."""
