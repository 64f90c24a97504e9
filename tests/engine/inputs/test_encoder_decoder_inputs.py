"""Prompts of encoder-decoder models, from what a user gives to what a request holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BartConfig, GenerationConfig, PreTrainedTokenizerBase

from engine import (
    AudioPrompt,
    ChatPrompt,
    EmbedsPrompt,
    ExplicitEncoderDecoderPrompt,
    ImagePrompt,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from engine.checkpoints.checkpoint import Checkpoint
from engine.inputs.input_processor import InputProcessor
from engine.inputs.prompt_processor import PlainPromptProcessor, PromptSources
from engine.inputs.prompt_tokens import FitCheck, InputLimits
from engine.interface.engine import NewRequest
from engine.models.registry import FAMILIES
from engine.requests.request import Request
from engine.text.tokenizer import load_tokenizer
from omni.seeded.encoder_decoders import build_bart, build_whisper
from tests.support.fixed_encoder import FixedEncoder

TEXT = "The rain in spain falls mainly on the"
BLOCK_SIZE = 4


class Family:
    """The input processing of one seeded checkpoint."""

    def __init__(self, folder: Path, encoder: FixedEncoder) -> None:
        self.checkpoint = Checkpoint.open(str(folder))
        tokenizer = load_tokenizer(folder)
        assert tokenizer is not None
        self.tokenizer: PreTrainedTokenizerBase = tokenizer
        limits = InputLimits(
            max_model_len=64,
            hidden_size=8,
            vocab_size=encoder.input_vocab_size,
            num_logits=encoder.input_vocab_size,
            block_size=BLOCK_SIZE,
            usable_tokens=64,
            dtype=torch.float32,
        )
        family = FAMILIES.find(self.checkpoint.architecture)
        assert family is not None
        self.inputs = family.prompts(PromptSources(self.checkpoint, encoder, tokenizer, limits, 0))
        self.requests = InputProcessor(
            tokenizer, self.inputs, FitCheck(limits), eos_token_ids=[2], seed=0, generation={}
        )

    def completions(self, prompt: Prompt, params: SamplingParams, **options: Any) -> list[Request]:
        new = NewRequest("r", prompt, params, **options)
        return self.requests.process(new)

    def request(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any):
        return self.completions(prompt, params or SamplingParams(), **options)[0]


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(build_bart(tmp_path_factory.mktemp("bart")), FixedEncoder(32, 768))


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(build_whisper(tmp_path_factory.mktemp("whisper")), FixedEncoder(100, 1000))


def tone(seconds: float, rate: int = 16_000) -> np.ndarray:
    return np.sin(np.arange(round(seconds * rate)) / 9).astype(np.float32)


@pytest.mark.parametrize("prompt", [TEXT, TextPrompt(TEXT)])
def test_a_text_alone_is_the_encoders_and_the_decoder_gets_its_default(
    prompt: Prompt, bart: Family
) -> None:
    request = bart.request(prompt)
    ids = bart.tokenizer(TEXT)["input_ids"]
    assert (ids[0], ids[-1]) == (0, 2), "the checkpoint's own special tokens"
    assert request.encoder_input.token_ids == tuple(ids)
    assert request.encoder_input.num_tokens == len(ids)
    assert request.encoder_input.text == TEXT
    assert request.token_ids == [2, 0]
    assert request.num_prompt_tokens == 2


@pytest.mark.parametrize("encoder", [TEXT, TextPrompt(TEXT), TokensPrompt((0, 9, 2))])
@pytest.mark.parametrize("decoder", [None, "the", TextPrompt("the"), TokensPrompt((9, 8))])
def test_every_pair_of_forms_is_the_same_as_each_alone(
    encoder: Any, decoder: Any, bart: Family
) -> None:
    request = bart.request(ExplicitEncoderDecoderPrompt(encoder, decoder))
    assert request.encoder_input.token_ids == bart.request(encoder).encoder_input.token_ids
    ids = {None: [2, 0], TokensPrompt((9, 8)): [2, 9, 8]}
    the = [2, *bart.tokenizer("the")["input_ids"][:-1]]
    assert request.token_ids == ids.get(decoder, the)


def test_what_the_checkpoint_never_says_is_suppressed_beside_what_the_user_names(
    whisper: Family,
) -> None:
    generation = whisper.checkpoint.generation_config
    assert generation is not None
    params = SamplingParams(suppress_token_ids=(5, generation.suppress_tokens[0]))
    state = whisper.request(AudioPrompt(tone(0.1), language="en"), params).sampling
    always = {5, *generation.suppress_tokens}
    assert set(state.masked_ids.tolist()) == always | set(generation.begin_suppress_tokens)
    state.append(7)
    assert set(state.masked_ids.tolist()) == always


def hashes(request: Any) -> list[bytes]:
    request.extend_hashes(BLOCK_SIZE)
    assert request.block_hashes
    return request.block_hashes


def test_decoder_blocks_are_shared_only_where_the_encoders_input_is(bart: Family) -> None:
    decoder = TokensPrompt((2, 0, *range(10, 21)))

    def blocks(encoder: str, tail: tuple[int, ...] = (), **options: Any) -> list[bytes]:
        ids = TokensPrompt((*decoder.prompt_token_ids, *tail))
        return hashes(bart.request(ExplicitEncoderDecoderPrompt(encoder, ids), **options))

    base = blocks(TEXT)
    assert blocks(TEXT) == base
    assert blocks(TEXT, (30, 31, 32))[: len(base)] == base, "however long the sequence gets"
    assert blocks(TEXT, params=SamplingParams(max_tokens=9)) == base
    assert not {*blocks("another text")} & {*base}
    assert not {*blocks(TEXT, cache_salt="a")} & {*base}


WRONG = {
    "audio": (AudioPrompt("a.wav"), "takes text or token ids, but the encoder prompt is audio"),
    "an image": (ImagePrompt("a.png"), "the encoder prompt is an image"),
    "embeddings": (EmbedsPrompt(torch.zeros(2, 8)), "the encoder prompt is embeddings"),
    "a pair in a pair": (
        ExplicitEncoderDecoderPrompt(ExplicitEncoderDecoderPrompt(TEXT)),
        "the encoder prompt is itself a pair of prompts",
    ),
    "nothing": (None, "the encoder prompt is missing"),
    "no ids": (TokensPrompt(()), "the prompt is empty"),
    "unknown ids": (TokensPrompt((0, 768)), "prompt token 1 is 768"),
    "too long": (TokensPrompt((5,) * 33), "has 33 tokens, but the model's encoder takes 32"),
    "an empty decoder prompt": (
        ExplicitEncoderDecoderPrompt(TEXT, TokensPrompt(())),
        "the prompt is empty",
    ),
    "audio for the decoder": (
        ExplicitEncoderDecoderPrompt(TEXT, AudioPrompt("a.wav")),
        "decoder takes text or token ids, but the decoder prompt is audio",
    ),
    "a decoder prompt that is too long": (
        ExplicitEncoderDecoderPrompt(TEXT, TokensPrompt((5,) * 64)),
        "the prompt has 65 tokens.* max_model_len is 64",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_a_text_to_text_model_cannot_take_is_refused(kind: str, bart: Family) -> None:
    prompt, expected = WRONG[kind]
    with pytest.raises(ValueError, match=expected):
        bart.request(prompt)


@pytest.mark.parametrize("prompt", [TEXT, TokensPrompt((1, 2)), ExplicitEncoderDecoderPrompt(TEXT)])
def test_text_is_refused_by_a_speech_model(prompt: Prompt, whisper: Family) -> None:
    with pytest.raises(ValueError, match="encoder takes audio .* but the encoder prompt is t"):
        whisper.request(prompt)


@pytest.mark.parametrize("content", [[{"type": "audio"}], [{"type": "audio"}, {"text": " "}], ""])
def test_a_lone_sound_of_a_chat_is_a_speech_models(content: Any, whisper: Family) -> None:
    asked = AudioPrompt(tone(0.1), language="en")
    expected = whisper.request(asked)
    chat = ChatPrompt(({"role": "user", "content": content},), {"audio": [asked]})
    found = whisper.request(chat)
    assert found.token_ids == expected.token_ids
    assert found.encoder_input is not None and expected.encoder_input is not None
    assert found.encoder_input.content_hash == expected.encoder_input.content_hash
    plain = ChatPrompt(chat.messages, {"audio": [tone(0.1)]})
    assert whisper.request(plain).encoder_input.content_hash == expected.encoder_input.content_hash


@pytest.mark.parametrize(
    ("words", "shown", "got"),
    [
        ([{"type": "text", "text": "What?"}], {"audio": ["a.wav"]}, "got 1 audio and text"),
        ("What?", {}, "got text"),
        ([], {"audio": ["a.wav", "b.wav"]}, "got 2 audio"),
        ([], {"audio": ["a.wav"], "image": ["a.png"]}, "got 1 image and 1 audio"),
        ([], {}, "got nothing"),
        (3, {"audio": ["a.wav"]}, "got 1 audio and text"),
    ],
)
def test_a_chat_that_is_more_than_a_sound_is_refused_by_a_speech_model(
    words: Any, shown: Any, got: str, whisper: Family
) -> None:
    with pytest.raises(
        ValueError, match=f"of a chat one sound without words: .*no earlier turns; {got}"
    ):
        whisper.request(ChatPrompt(({"role": "user", "content": words},), shown))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (ExplicitEncoderDecoderPrompt(TEXT, TEXT), "no encoder beside its decoder"),
        (ExplicitEncoderDecoderPrompt(TEXT), "no encoder beside its decoder"),
        (ExplicitEncoderDecoderPrompt(AudioPrompt("a.wav"), TEXT), "no encoder beside its decoder"),
        (ExplicitEncoderDecoderPrompt(AudioPrompt("a.wav")), "reads text and takes no sound"),
        (AudioPrompt("a.wav"), "reads text and takes no sound"),
        (ImagePrompt("a.png"), "reads text and takes no images"),
    ],
)
def test_a_decoder_only_model_takes_no_encoder_prompt(
    prompt: Prompt, expected: str, bart: Family
) -> None:
    limits = InputLimits(64, 8, 768, 768, 4, 64, torch.float32)
    decoder_only = InputProcessor(
        bart.tokenizer,
        PlainPromptProcessor(PromptSources(bart.checkpoint, None, bart.tokenizer, limits, 0)),
        FitCheck(limits),
        eos_token_ids=[2],
        seed=0,
        generation={},
    )
    with pytest.raises(ValueError, match=expected):
        decoder_only.process(NewRequest("r", prompt))


def test_a_checkpoint_without_generation_config_gets_that_of_its_config(tmp_path: Path) -> None:
    folder = build_bart(tmp_path)
    (folder / "generation_config.json").unlink()
    bart = Family(folder, FixedEncoder(32, 768))
    assert bart.checkpoint.generation_config is None
    assert bart.request(TEXT).token_ids == [2, 0]
    assert GenerationConfig.from_model_config(BartConfig()).decoder_start_token_id == 2
