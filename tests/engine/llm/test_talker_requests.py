"""What a talker refuses, and that a refusal is one request's alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine import (
    CodecPrompt,
    EmbedsPrompt,
    EngineConfig,
    LLMEngine,
    Prompt,
    SamplingParams,
    SpeechPrompt,
    TextPrompt,
    TokensPrompt,
)
from tests.support.idle_engine import drop_all
from tests.support.speech import WIDTH, cut, made_up

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
WHOLE = made_up(0, 6, 4)
FIRST = replace(WHOLE, is_last=False)
NONE = torch.zeros(0, WIDTH)


@pytest.fixture(scope="module")
def engine(seeded: Callable[[str], str]) -> LLMEngine:
    return LLMEngine(
        EngineConfig(model=seeded("qwen2_5_omni"), part="talker", block_size=4, max_model_len=40)
    )


@pytest.fixture
def live(engine: LLMEngine) -> LLMEngine:
    """With one request that has had its first chunk."""
    drop_all(engine)
    engine.add_request("live", FIRST, GREEDY)
    return engine


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (TextPrompt("hello"), "a talker reads the rows of a thinker"),
        ("hello", "got str"),
        (TokensPrompt((1, 2)), "got TokensPrompt"),
        (EmbedsPrompt(torch.zeros(2, WIDTH)), "got EmbedsPrompt"),
        (CodecPrompt((1, 2)), "got CodecPrompt"),
        (replace(WHOLE, prompt_rows=NONE), "prompt is empty"),
        (replace(WHOLE, prompt_rows=torch.zeros(2, WIDTH + 1)), r"prompt_rows must be \(num"),
        (replace(WHOLE, reply_rows=torch.zeros(WIDTH)), r"reply_rows must be \(num"),
        (replace(WHOLE, reply_rows=torch.zeros(2, WIDTH, dtype=torch.int64)), "floating point"),
        (replace(WHOLE, reply_rows=torch.full((1, WIDTH), torch.nan)), "reply_rows hold NaN"),
        (replace(WHOLE, speaker="Chelsea"), "did you mean 'Chelsie'"),
        (replace(WHOLE, positions=torch.zeros(3, 5, dtype=torch.int64)), r"\(3, 6\)"),
        (replace(WHOLE, positions=torch.zeros(3, 6)), "int64"),
        (replace(WHOLE, positions=torch.full((3, 6), -1)), "negative"),
        (replace(WHOLE, positions=torch.full((3, 6), 39)), "reaches place"),
        (made_up(0, 39, 4), "max_model_len is 40"),
        (FIRST, "first of several chunks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_it_refuses_what_it_cannot_speak(engine: LLMEngine, prompt: Prompt, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.generate(prompt, GREEDY)
    assert not engine.has_unfinished_requests


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (TokensPrompt((1,)), "goes on with a SpeechPrompt"),
        (FIRST, "belong into the first chunk"),
        (SpeechPrompt(NONE, torch.zeros(1, WIDTH - 1)), "must be"),
        (SpeechPrompt(NONE, torch.full((1, WIDTH), torch.inf)), "infinite"),
    ],
    ids=["form", "prompt rows", "width", "numbers"],
)
def test_a_refused_chunk_changes_nothing(live: LLMEngine, chunk: Prompt, message: str) -> None:
    expected = live_engine_answer(live, WHOLE)
    with pytest.raises(ValueError, match=message):
        live.extend_request("live", chunk)
    assert live_engine_answer(live, made_up(1, 5, 2)) is not None
    live.extend_request("live", SpeechPrompt(NONE, NONE))
    assert finish(live, "live") == expected
    live.check_integrity()


def test_the_last_chunk_is_the_last(live: LLMEngine) -> None:
    live.extend_request("live", SpeechPrompt(NONE, NONE))
    for is_last in (True, False):
        with pytest.raises(ValueError, match="ended"):
            live.extend_request("live", SpeechPrompt(NONE, NONE, is_last=is_last))
    assert finish(live, "live") == live_engine_answer(live, WHOLE)


def test_who_waits_for_rows_can_be_aborted(live: LLMEngine) -> None:
    while live.step():
        pass
    assert live.needs_input("live")
    live.abort("live")
    live.check_integrity()
    kv = live.stats().kv
    assert kv is not None and kv.held == 0
    assert not live.needs_input("live")
    with pytest.raises(ValueError, match="not live"):
        live.partial_outputs("live", 0)


def test_a_speech_may_end_before_its_text(live: LLMEngine) -> None:
    first, *rest = cut(made_up(0, 6, 9), (3,))
    live.add_request("short", first, SamplingParams(temperature=0.0, max_tokens=2))
    finish(live, "short")
    for chunk in rest:
        live.extend_request("short", chunk)
    assert not live.needs_input("short")
    live.check_integrity()


def test_a_reply_of_one_token_has_no_rows_and_is_spoken(engine: LLMEngine) -> None:
    drop_all(engine)
    (output,) = engine.generate(made_up(0, 6, 0), GREEDY)
    assert output.error is None and len(output.outputs[0].token_ids) > 0


def test_completions_share_the_rows_of_their_prompt(engine: LLMEngine) -> None:
    drop_all(engine)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=6, n=2, ignore_eos=True)
    (whole,) = engine.generate(made_up(0, 6, 4), params)
    first, *rest = cut(made_up(0, 6, 4), (1,))
    engine.add_request("both", first, params)
    done: list[Any] = []
    while engine.has_unfinished_requests:
        if engine.needs_input("both"):
            engine.extend_request("both", rest.pop(0))
        done = [o for o in engine.step() if o.finished] or done
    assert [each.token_ids for each in done[0].outputs] == [
        each.token_ids for each in whole.outputs
    ]
    assert whole.outputs[0].token_ids != whole.outputs[1].token_ids


def test_stop_tokens_end_it_and_its_begin_token_is_never_said(engine: LLMEngine) -> None:
    drop_all(engine)
    talker = SamplingParams(temperature=5.0, max_tokens=30)
    ends = set()
    for family in range(40):
        params = talker.model_copy(update={"seed": family})
        (output,) = engine.generate(made_up(family, 3, 1), params)
        ids, reason = output.outputs[0].token_ids, output.outputs[0].finish_reason
        assert 257 not in ids
        assert not {256, 258} & set(ids[:-1])
        if reason == "stop":
            ends.add(ids[-1])
    assert ends <= {256, 258} and ends


def test_other_models_take_no_speech(seeded: Callable[[str], str]) -> None:
    engine = LLMEngine(EngineConfig(model=seeded("qwen2"), max_model_len=32, block_size=4))
    assert engine.speakers is None
    for prompt, reader in ((WHOLE, "model that speaks"), (CodecPrompt((1,)), "generator")):
        with pytest.raises(ValueError, match=f"what a {reader} reads"):
            engine.generate(prompt)
    engine.add_request("text", TokensPrompt((1, 2)), GREEDY)
    with pytest.raises(ValueError, match="takes its prompts whole"):
        engine.extend_request("text", WHOLE)
    assert not engine.needs_input("text")


def live_engine_answer(engine: LLMEngine, prompt: SpeechPrompt) -> tuple[int, ...]:
    """What it says to a whole prompt, while others are live."""
    engine.add_request("other", prompt, GREEDY)
    return finish(engine, "other")


def finish(engine: LLMEngine, request_id: str) -> tuple[int, ...]:
    while True:
        for output in engine.step():
            if output.finished and output.request_id == request_id:
                assert output.error is None
                return output.outputs[0].token_ids
