"""``truncate_prompt_tokens`` keeps what transformers' tokenizers keep."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from engine import (
    ChatPrompt,
    EmbedsPrompt,
    EncoderEngine,
    EngineConfig,
    ImagePrompt,
    LLMEngine,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from engine.interface.placed_error import PlacedError

TEXT = "There are four clocks in the library, and each of them tells another time. " * 4


def tokenizer_of(engine: Any, side: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(engine.config.model, truncation_side=side)


@pytest.fixture(scope="module")
def encoder(seeded: Callable[[str], str]) -> Any:
    with closing(EncoderEngine(EngineConfig(model=seeded("bert"), num_blocks=64))) as engine:
        yield engine


@pytest.fixture(scope="module")
def decoder(seeded: Callable[[str], str]) -> Any:
    with closing(
        LLMEngine(EngineConfig(model=seeded("qwen2"), num_blocks=64, max_model_len=64))
    ) as engine:
        yield engine


def pooled(engine: Any, prompt: Any, kept: int | None = None) -> torch.Tensor:
    params = None
    if kept is not None:
        params = SamplingParams(max_tokens=0, truncate_prompt_tokens=kept)
    (output,) = run(engine, prompt, params)
    return output.tensors["pooled"]


def run(engine: Any, prompt: Any, params: SamplingParams | None) -> list[Any]:
    engine.add_request("r", prompt, params)
    outputs: list[Any] = []
    while engine.has_unfinished_requests:
        outputs += [each for each in engine.step() if each.finished]
    return outputs


@pytest.mark.parametrize("num_tokens", [4, 9, 40, 500])
def test_an_encoder_keeps_the_beginning_and_the_special_tokens(
    encoder: Any, num_tokens: int
) -> None:
    tokenizer = tokenizer_of(encoder, "right")
    ids = tokenizer(TEXT, truncation=True, max_length=num_tokens)["input_ids"]
    assert ids[-1] == tokenizer.sep_token_id
    expected = pooled(encoder, TokensPrompt(tuple(ids)))
    assert torch.equal(pooled(encoder, TEXT, num_tokens), expected)
    assert torch.equal(pooled(encoder, TextPrompt(TEXT), num_tokens), expected)


def test_minus_one_keeps_as_much_as_the_model_takes(encoder: Any) -> None:
    tokenizer = tokenizer_of(encoder, "right")
    ids = tokenizer(TEXT * 50, truncation=True, max_length=encoder.max_model_len)["input_ids"]
    assert len(ids) == encoder.max_model_len
    expected = pooled(encoder, TokensPrompt(tuple(ids)))
    assert torch.equal(pooled(encoder, TEXT * 50, -1), expected)
    # A text that is too long to be read at all is cut, too.
    assert torch.equal(pooled(encoder, TEXT * 5000, -1), expected)
    with pytest.raises(ValueError, match="characters"):
        pooled(encoder, TEXT * 5000)


def test_token_ids_and_rows_are_cut_alike(encoder: Any, decoder: Any) -> None:
    ids = tuple(range(5, 45))
    assert torch.equal(
        pooled(encoder, TokensPrompt(ids), 7), pooled(encoder, TokensPrompt(ids[:7]))
    )
    (found,) = run(decoder, TokensPrompt(ids), SamplingParams(truncate_prompt_tokens=7))
    assert found.prompt_token_ids == ids[-7:]
    rows = torch.randn(40, decoder.hidden_size)
    greedy = SamplingParams(temperature=0.0, max_tokens=5)
    cut = greedy.model_copy(update={"truncate_prompt_tokens": 7})
    (found,) = run(decoder, EmbedsPrompt(rows), cut)
    (expected,) = run(decoder, EmbedsPrompt(rows[-7:]), greedy)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert found.num_prompt_tokens == 7


@pytest.mark.parametrize(("max_tokens", "side"), [(5, "left"), (0, "right")])
def test_a_decoder_keeps_the_end_unless_it_generates_nothing(
    decoder: Any, max_tokens: int, side: str
) -> None:
    tokenizer = tokenizer_of(decoder, side)
    for asked, kept in ((9, 9), (-1, 64 - max_tokens)):
        params = SamplingParams(max_tokens=max_tokens, truncate_prompt_tokens=asked)
        (found,) = run(decoder, TEXT, params)
        expected = tokenizer(TEXT, truncation=True, max_length=kept)["input_ids"]
        assert list(found.prompt_token_ids) == expected
    messages = ({"role": "user", "content": TEXT},)
    params = SamplingParams(max_tokens=max_tokens, truncate_prompt_tokens=9)
    (found,) = run(decoder, ChatPrompt(messages), params)
    rendered = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, return_dict=False
    )
    assert list(found.prompt_token_ids) == (rendered[-9:] if max_tokens else rendered[:9])


@pytest.mark.parametrize(
    ("prompt", "asked", "message"),
    [
        (TEXT, 65, "truncate_prompt_tokens is 65, but max_model_len is 64"),
        (ImagePrompt(b"x"), 5, "not a ImagePrompt"),
        (TextPrompt("x", multi_modal_data={"image": [b"x"]}), 5, "with images or sound is not cut"),
    ],
)
def test_what_is_not_cut_is_refused(decoder: Any, prompt: Any, asked: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoder.add_request("r", prompt, SamplingParams(truncate_prompt_tokens=asked))


def test_what_could_never_be_is_refused_before_there_is_a_prompt(
    encoder: Any, decoder: Any
) -> None:
    for engine, params in (
        (decoder, SamplingParams(truncate_prompt_tokens=65)),
        (decoder, SamplingParams(max_tokens=64, truncate_prompt_tokens=-1)),
        (encoder, SamplingParams(max_tokens=0, truncate_prompt_tokens=10**6)),
    ):
        with pytest.raises(PlacedError) as error:
            engine.check_sampling(params)
        assert error.value.place == ("truncate_prompt_tokens",)
    with pytest.raises(ValueError, match="takes no sampling parameters"):
        encoder.check_sampling(SamplingParams(truncate_prompt_tokens=5))
    with pytest.raises(ValueError, match="0 would leave nothing"):
        SamplingParams(truncate_prompt_tokens=0)
    with pytest.raises(ValueError, match="the tokenizer adds 2 special tokens"):
        pooled(encoder, TEXT, 2)
