"""Limits of requests are checked before any work; prompts are truncated as in transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
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
from engine.interface.config import RequestLimits
from engine.interface.placed_error import PlacedError
from tests.support.idle_engine import finish


@pytest.fixture(scope="module")
def engine(seeded: Callable[[str], str]) -> Iterator[LLMEngine]:
    config = EngineConfig(
        model=seeded("qwen2"),
        block_size=4,
        num_blocks=64,
        max_model_len=32,
        limits=RequestLimits(max_completions=3, max_logprobs=4, max_stop_strings=2),
    )
    with closing(LLMEngine(config)) as engine:
        yield engine


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (dict(n=4), "n is 4, but at most 3 completions"),
        (dict(n=10**15), "raise engine.limits.max_completions"),
        (dict(logprobs=5), "logprobs is 5, but at most 4 tokens .* engine.limits.max_logprobs"),
        (dict(stop=["a", "b", "c"]), "stop has 3 strings, .* engine.limits.max_stop_strings"),
        (dict(stop=["x" * 1025]), "have 1025 characters, .* engine.limits.max_stop_chars"),
    ],
)
def test_sampling_beyond_the_limits_is_refused_before_the_prompt_is_read(
    engine: LLMEngine, params: dict[str, Any], message: str
):
    sampling = SamplingParams(**params)
    with pytest.raises(PlacedError, match=message) as refused:
        engine.check_sampling(sampling)
    assert refused.value.place == tuple(params)

    class Unread:
        """Prompt whose attributes must not be read."""

        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"the prompt was read: {name}")

    with pytest.raises(ValueError, match=message):
        engine.add_request("r", Unread(), sampling)  # type: ignore[arg-type]
    assert engine.live_request_ids == ()


def test_sampling_at_the_limits_runs(engine: LLMEngine):
    params = SamplingParams(n=3, logprobs=4, stop=["\x00", "\x01"], max_tokens=2, seed=1)
    (output,) = engine.generate("Hello", params)
    assert len(output.outputs) == 3
    assert [len(each.logprobs[0].top) for each in output.outputs if each.logprobs] == [4] * 3


def test_the_length_of_a_text_is_checked_before_it_is_tokenized(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a text that is too long was tokenized")

    monkeypatch.setattr(type(engine.tokenizer), "__call__", refuse)
    text = "a" * (2**16 + 1)
    chat = ChatPrompt(({"role": "user", "content": [{"type": "text", "text": text}]},))
    for prompt in (text, TextPrompt(text), chat):
        with pytest.raises(ValueError, match="has 655.. characters, but at most 65536 are read"):
            engine.add_request("r", prompt)


def test_the_limit_of_characters_is_configurable(seeded: Callable[[str], str]):
    limits = RequestLimits(max_prompt_chars=5)
    engine = LLMEngine(
        EngineConfig(model=seeded("qwen2"), max_model_len=32, num_blocks=32, limits=limits)
    )
    assert engine.generate("12345", SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match="6 characters, .* raise engine.limits.max_prompt_chars"):
        engine.generate("123456", SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match="template makes more than 5 characters of the messages"):
        engine.generate(ChatPrompt(({"role": "user", "content": "1"},)))
    engine.close()


class Counted:
    """Sequence of ids that has a length but must not be iterated."""

    def __len__(self) -> int:
        return 10**12

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("too many ids were iterated")

    def __contains__(self, item: object) -> bool:
        return False


@pytest.mark.parametrize(
    "prompt",
    [
        TokensPrompt(Counted()),  # type: ignore[arg-type]
        TokensPrompt(count()),  # type: ignore[arg-type]
        # An expanded view without memory for its rows; checking it must not allocate any.
        EmbedsPrompt(torch.zeros(1, 64).expand(10**12, 64)),
    ],
    ids=["ids", "ids without an end", "rows"],
)
def test_ids_and_rows_are_counted_before_they_are_read(engine: LLMEngine, prompt: Any):
    with pytest.raises(ValueError, match=r"the prompt has \d+ tokens, but max_model_len is 32"):
        engine.add_request("r", prompt)


def test_a_chat_nested_too_deeply_is_refused(engine: LLMEngine):
    calls: list[Any] = []
    calls.append(calls)
    nested: Any = "x"
    for _ in range(100_000):
        nested = [nested]
    for message in (
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "user", "content": "x", "more": nested},
    ):
        with pytest.raises(ValueError, match="nests deeper than 64 levels"):
            engine.add_request("r", ChatPrompt((message,)))


def test_too_many_images_are_refused_before_they_are_opened(seeded: Callable[[str], str]):
    with pytest.raises(ValueError, match="shows 3 images, .* engine.limits.max_items"):
        RequestLimits(max_items=2).check_items(3)
    limits = RequestLimits(max_items=3)
    engine = LLMEngine(
        EngineConfig(model=seeded("llava"), max_model_len=20, num_blocks=32, limits=limits)
    )
    pixels = torch.zeros(30, 30, 3, dtype=torch.uint8)
    cases: list[tuple[list[Any], str]] = [
        (["no.png"] * 4, "shows 4 images"),
        # The prompt is too long with the second image, so the third is not opened.
        ([pixels, pixels, "no.png"], "the prompt has 3. tokens, but max_model_len is 20"),
    ]
    for images, message in cases:
        prompt = TextPrompt("<image>" * len(images), multi_modal_data={"image": images})
        with pytest.raises(ValueError, match=message):
            engine.add_request("r", prompt)
    engine.close()


TEXT = "There are four clocks in the library, and each of them tells another time. " * 4


def tokenizer_of(engine: Any, side: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(engine.config.model, truncation_side=side)


@pytest.fixture(scope="module")
def encoder(seeded: Callable[[str], str]) -> Any:
    with closing(EncoderEngine(EngineConfig(model=seeded("bert"), num_blocks=64))) as engine:
        yield engine


@pytest.fixture(scope="module")
def decoder(seeded: Callable[[str], str]) -> Any:
    config = EngineConfig(model=seeded("qwen2"), num_blocks=64, max_model_len=64)
    with closing(LLMEngine(config)) as engine:
        yield engine


def pooled(engine: Any, prompt: Any, kept: int | None = None) -> torch.Tensor:
    params = None
    if kept is not None:
        params = SamplingParams(max_tokens=0, truncate_prompt_tokens=kept)
    return run(engine, prompt, params).tensors["pooled"]


def run(engine: Any, prompt: Any, params: SamplingParams | None) -> Any:
    engine.add_request("r", prompt, params)
    return finish(engine)["r"]


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


def test_minus_one_keeps_max_model_len_tokens(encoder: Any) -> None:
    tokenizer = tokenizer_of(encoder, "right")
    ids = tokenizer(TEXT * 50, truncation=True, max_length=encoder.max_model_len)["input_ids"]
    assert len(ids) == encoder.max_model_len
    expected = pooled(encoder, TokensPrompt(tuple(ids)))
    assert torch.equal(pooled(encoder, TEXT * 50, -1), expected)
    # A text beyond the limit of characters is truncated, too.
    assert torch.equal(pooled(encoder, TEXT * 5000, -1), expected)
    with pytest.raises(ValueError, match="characters"):
        pooled(encoder, TEXT * 5000)


def test_token_ids_and_embeddings_are_truncated(encoder: Any, decoder: Any) -> None:
    ids = tuple(range(5, 45))
    assert torch.equal(
        pooled(encoder, TokensPrompt(ids), 7), pooled(encoder, TokensPrompt(ids[:7]))
    )
    found = run(decoder, TokensPrompt(ids), SamplingParams(truncate_prompt_tokens=7))
    assert found.prompt_token_ids == ids[-7:]
    rows = torch.randn(40, decoder.hidden_size)
    greedy = SamplingParams(temperature=0.0, max_tokens=5)
    cut = greedy.model_copy(update={"truncate_prompt_tokens": 7})
    found = run(decoder, EmbedsPrompt(rows), cut)
    expected = run(decoder, EmbedsPrompt(rows[-7:]), greedy)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert found.num_prompt_tokens == 7


@pytest.mark.parametrize(("max_tokens", "side"), [(5, "left"), (0, "right")])
def test_a_decoder_keeps_the_end_unless_it_generates_nothing(
    decoder: Any, max_tokens: int, side: str
) -> None:
    tokenizer = tokenizer_of(decoder, side)
    for limit, kept in ((9, 9), (-1, 64 - max_tokens)):
        params = SamplingParams(max_tokens=max_tokens, truncate_prompt_tokens=limit)
        found = run(decoder, TEXT, params)
        expected = tokenizer(TEXT, truncation=True, max_length=kept)["input_ids"]
        assert list(found.prompt_token_ids) == expected
    messages = ({"role": "user", "content": TEXT},)
    params = SamplingParams(max_tokens=max_tokens, truncate_prompt_tokens=9)
    found = run(decoder, ChatPrompt(messages), params)
    rendered = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, return_dict=False
    )
    assert list(found.prompt_token_ids) == (rendered[-9:] if max_tokens else rendered[:9])


@pytest.mark.parametrize(
    ("prompt", "limit", "message"),
    [
        (TEXT, 65, "truncate_prompt_tokens is 65, but max_model_len is 64"),
        (ImagePrompt(b"x"), 5, "not a ImagePrompt"),
        (TextPrompt("x", multi_modal_data={"image": [b"x"]}), 5, "with images or sound is not cut"),
    ],
)
def test_invalid_truncation_is_refused(decoder: Any, prompt: Any, limit: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoder.add_request("r", prompt, SamplingParams(truncate_prompt_tokens=limit))


def test_impossible_truncation_is_refused_without_a_prompt(encoder: Any, decoder: Any) -> None:
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
