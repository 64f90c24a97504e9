"""What a request may ask for is bounded before work; prompts are cut as transformers cuts them."""

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


@pytest.fixture(scope="module")
def engine(seeded: Callable[[str], str]) -> Iterator[LLMEngine]:
    config = EngineConfig(
        model=seeded("qwen2"),
        block_size=4,
        num_blocks=64,
        max_model_len=32,
        limits=RequestLimits(max_completions=3, max_logprobs=4, max_stop_strings=2),
    )
    engine = LLMEngine(config)
    yield engine
    engine.close()


@pytest.mark.parametrize(
    ("params", "told"),
    [
        (dict(n=4), "n is 4, but at most 3 completions"),
        (dict(n=10**30), "raise engine.limits.max_completions"),
        (dict(logprobs=5), "logprobs is 5, but at most 4 tokens .* engine.limits.max_logprobs"),
        (dict(stop=["a", "b", "c"]), "stop has 3 strings, .* engine.limits.max_stop_strings"),
        (dict(stop=["x" * 1025]), "have 1025 characters, .* engine.limits.max_stop_chars"),
    ],
)
def test_sampling_that_asks_for_too_much_is_refused_before_the_prompt_is_read(
    engine: LLMEngine, params: dict[str, Any], told: str
):
    asked = SamplingParams(**params)
    with pytest.raises(PlacedError, match=told) as refused:
        engine.check_sampling(asked)
    assert refused.value.place == tuple(params)

    class Unread:
        """Whatever asks it for anything has begun to work."""

        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"the prompt was read: {name}")

    with pytest.raises(ValueError, match=told):
        engine.add_request("r", Unread(), asked)  # type: ignore[arg-type]
    assert engine.live_request_ids == ()


def test_what_just_fits_runs(engine: LLMEngine):
    params = SamplingParams(n=3, logprobs=4, stop=["\x00", "\x01"], max_tokens=2, seed=1)
    (output,) = engine.generate("Hello", params)
    assert len(output.outputs) == 3
    assert [len(each.logprobs[0].top) for each in output.outputs if each.logprobs] == [4] * 3


def refuse_to_tokenize(*_: Any, **__: Any) -> Any:
    raise AssertionError("a text that is too long was tokenized")


def test_a_text_is_measured_before_it_is_tokenized(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(type(engine.tokenizer), "__call__", refuse_to_tokenize)
    text = "a" * (2**16 + 1)
    chat = ChatPrompt(({"role": "user", "content": [{"type": "text", "text": text}]},))
    for prompt in (text, TextPrompt(text), chat):
        with pytest.raises(ValueError, match="has 655.. characters, but at most 65536 are read"):
            engine.add_request("r", prompt)


def test_the_limit_of_characters_can_be_set(seeded: Callable[[str], str]):
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
    """Ids that tell how many of them there are before they are gone through."""

    def __len__(self) -> int:
        return 10**12

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("ids that are too many were gone through")

    def __contains__(self, item: object) -> bool:
        return False


@pytest.mark.parametrize(
    "prompt",
    [
        TokensPrompt(Counted()),  # type: ignore[arg-type]
        TokensPrompt(count()),  # type: ignore[arg-type]
        # No memory lies behind so many rows, and none is taken to look at them.
        EmbedsPrompt(torch.zeros(1, 64).expand(10**12, 64)),
    ],
    ids=["ids", "ids without an end", "rows"],
)
def test_ids_and_rows_are_counted_before_they_are_looked_at(engine: LLMEngine, prompt: Any):
    with pytest.raises(ValueError, match=r"the prompt has \d+ tokens, but max_model_len is 32"):
        engine.add_request("r", prompt)


def test_a_chat_that_nests_without_end_is_refused(engine: LLMEngine):
    calls: list[Any] = []
    calls.append(calls)
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    with pytest.raises(ValueError, match="nests deeper than 64 levels"):
        engine.add_request("r", ChatPrompt((message,)))
    nested: Any = "x"
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ValueError, match="nests deeper than 64 levels"):
        engine.add_request("r", ChatPrompt(({"role": "user", "content": "x", "more": nested},)))


def test_images_are_counted_before_any_is_opened(seeded: Callable[[str], str]):
    with pytest.raises(ValueError, match="shows 3 images, .* engine.limits.max_items"):
        RequestLimits(max_items=2).check_items(3)
    limits = RequestLimits(max_items=1)
    engine = LLMEngine(
        EngineConfig(model=seeded("llava"), max_model_len=64, num_blocks=32, limits=limits)
    )
    prompt = TextPrompt("<image><image>", multi_modal_data={"image": ["no.png", "no.png"]})
    with pytest.raises(ValueError, match="shows 2 images"):
        engine.add_request("r", prompt)
    engine.close()


def test_no_image_is_opened_behind_one_with_which_the_prompt_is_too_long(
    seeded: Callable[[str], str],
):
    engine = LLMEngine(EngineConfig(model=seeded("llava"), max_model_len=20, num_blocks=32))
    pixels = torch.zeros(30, 30, 3, dtype=torch.uint8)
    shown = {"image": [pixels, pixels, "no such file.png"]}
    with pytest.raises(ValueError, match="the prompt has 3. tokens, but max_model_len is 20"):
        engine.add_request("r", TextPrompt("<image>" * 3, multi_modal_data=shown))
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
