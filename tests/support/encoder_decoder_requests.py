"""Requests for the seeded encoder-decoders, and transformers' processing of their raw inputs."""

from __future__ import annotations

import wave
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoTokenizer,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
)

from engine import (
    AudioPrompt,
    DecoderPrompt,
    EncoderPrompt,
    ExplicitEncoderDecoderPrompt,
    ImagePrompt,
    Prompt,
    TextPrompt,
    TokensPrompt,
)
from engine.requests.encoder_input import EncoderInput
from tests.support.encoder_decoder_reference import EncoderDecoderReference
from tests.support.greedy_reference import GreedyAnswer

SAMPLING_RATE = 16_000
IMAGE = "<|image|>"

_TEXTS = (
    "The rain in spain falls mainly on the",
    "Hm",
    "First collect the tools, then read the instructions, and only then begin. " * 2,
    "How many rivers cross the plain?",
)


@dataclass(frozen=True, eq=False)
class Case:
    """A prompt, with the raw inputs of both sides for the oracle.

    Compared by identity: samples and pictures have no hash.
    """

    encoder: str | tuple[int, ...] | NDArray[np.float32] | Image.Image | None
    decoder: tuple[int, ...]
    prompt: Prompt


def tone(seconds: float, pitch: float = 440.0, seed: int = 0) -> NDArray[np.float32]:
    """Return a tone with some noise, mono."""
    times = np.arange(int(seconds * SAMPLING_RATE)) / SAMPLING_RATE
    noise = np.random.default_rng(seed).normal(0, 0.05, len(times))
    samples: NDArray[np.float32] = (0.5 * np.sin(2 * np.pi * pitch * times) + noise).astype("f4")
    return samples


def write_wav(path: Path, samples: NDArray[Any], rate: int = SAMPLING_RATE) -> Path:
    """Write mono samples in -1 to 1 as a 16-bit file."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.round(samples * 32767).astype("<i2").tobytes())
    return path


def noise_image(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def cases(family: str, folder: str) -> list[Case]:
    """Return cases of mixed lengths on both sides, with default and explicit decoder prompts."""
    match family:
        case "whisper":
            return _speech_cases(folder)
        case "mllama":
            return _image_cases(folder)
    start, default = ((2,), (2, 0)) if family == "bart" else ((0,), (0,))
    tokens = tuple(torch.randint(5, 700, (30,), generator=torch.Generator()).tolist())
    return [
        Case(_TEXTS[0], default, _TEXTS[0]),
        Case(_TEXTS[1], default, TextPrompt(_TEXTS[1])),
        Case(tokens, default, TokensPrompt(tokens)),
        _explicit(_TEXTS[2], (*start, 51, 178, 60, 61, 62, 63, 64, 65, 66), start),
        _explicit(_TEXTS[3], (*start, 9), ()),
    ]


def _explicit(text: str, decoder: tuple[int, ...], left_out: tuple[int, ...]) -> Case:
    given = TokensPrompt(decoder[len(left_out) :])
    return Case(text, decoder, ExplicitEncoderDecoderPrompt(text, given))


def _speech_cases(folder: str) -> list[Case]:
    vocab = _tokenizer(folder).get_vocab()

    def control(*names: str) -> tuple[int, ...]:
        return tuple(vocab[f"<|{name}|>"] for name in names)

    english = control("startoftranscript", "en", "transcribe", "notimestamps")
    german = control("startoftranscript", "de", "translate", "notimestamps")
    sounds = [tone(seconds, 200.0 * seconds, int(9 * seconds)) for seconds in (0.3, 1.0, 1.7, 2.0)]
    longer = (*english, 40, 41, 42, 43)
    return [
        Case(sounds[0], english, AudioPrompt(sounds[0], language="en")),
        Case(sounds[1], german, AudioPrompt(sounds[1], language="german", task="translate")),
        Case(sounds[2], longer, _pair(AudioPrompt(sounds[2]), TokensPrompt(longer))),
        Case(sounds[3], english, AudioPrompt(torch.from_numpy(sounds[3]), language="en")),
    ]


def _image_cases(folder: str) -> list[Case]:
    tokenizer = _tokenizer(folder)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text).input_ids)

    images = [noise_image(50, 50), noise_image(110, 50, 1), noise_image(100, 110, 2)]
    texts = [f"{IMAGE} what is this?", f"Look closely at {IMAGE} and say", "No image at all"]
    alone = (tokenizer.convert_tokens_to_ids(IMAGE), tokenizer.bos_token_id)
    return [
        Case(images[0], ids(texts[0]), _pair(ImagePrompt(images[0]), texts[0])),
        Case(images[1], ids(texts[1]), _pair(ImagePrompt(images[1]), texts[1])),
        Case(None, ids(texts[2]), texts[2]),
        Case(images[2], alone, ImagePrompt(images[2])),
    ]


def _pair(encoder: EncoderPrompt, decoder: DecoderPrompt) -> ExplicitEncoderDecoderPrompt:
    return ExplicitEncoderDecoderPrompt(encoder, decoder)


@cache
def _tokenizer(folder: str) -> Any:
    return AutoTokenizer.from_pretrained(folder)


class Oracle:
    """transformers with a checkpoint's weights, tokenizer, feature extractor and ``generate``."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.reference = EncoderDecoderReference(folder)

    def read(self, case: Case) -> EncoderInput | None:
        """Return the encoder's input, as transformers' processors compute it."""
        raw = case.encoder
        if raw is None:
            return None
        if isinstance(raw, str):
            raw = tuple(_tokenizer(self.folder)(raw).input_ids)
        if isinstance(raw, tuple):
            return EncoderInput(len(raw), b"", token_ids=raw)
        if isinstance(raw, Image.Image):
            made = AutoImageProcessor.from_pretrained(self.folder)(raw, return_tensors="pt")
            names = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
            return EncoderInput(68, b"", features={name: made[name][0] for name in names})
        extractor = AutoFeatureExtractor.from_pretrained(self.folder)
        made = extractor(raw, sampling_rate=SAMPLING_RATE, return_tensors="pt")
        return EncoderInput(100, b"", features={"input_features": made["input_features"][0]})

    @torch.inference_mode()
    def answer(self, case: Case, num_tokens: int, rules: Sequence[Any] = ()) -> GreedyAnswer:
        """Run greedy ``generate`` with the generation config's suppression, and hidden states."""
        entry = self.read(case)
        # Not Whisper's own loop over audio windows, which builds prompts itself.
        out: Any = GenerationMixin.generate(
            self.reference.model,
            **self.reference.inputs(entry, case.decoder),
            generation_config=self._generation_config(num_tokens),
            logits_processor=LogitsProcessorList(rules),
            return_dict_in_generate=True,
            output_scores=True,
        )
        generated = out.sequences[0, -num_tokens:].tolist()
        tops = [scores[0].topk(2).values.tolist() for scores in out.scores]
        hidden, _ = self.reference.decode(entry, (*case.decoder, *generated[:-1]))
        return GreedyAnswer(generated, [first - second for first, second in tops], hidden)

    def _generation_config(self, num_tokens: int) -> GenerationConfig:
        own = self.reference.model.generation_config
        return GenerationConfig(
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=own.pad_token_id,
            decoder_start_token_id=own.decoder_start_token_id,
            suppress_tokens=own.suppress_tokens,
            begin_suppress_tokens=own.begin_suppress_tokens,
            # T5's cache has no more layers than the encoder.
            use_cache=self.reference.config.model_type != "t5",
        )
