"""Talkers: chunked prompts equal whole ones, cached, preempted or paused; invalid prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import (
    CodecPrompt,
    EmbedsPrompt,
    EngineConfig,
    LLMEngine,
    Prompt,
    RequestOutput,
    SamplingParams,
    SpeechPrompt,
    TextPrompt,
    TokensPrompt,
)
from tests.support.examples import examples
from tests.support.idle_engine import drop_all
from tests.support.request_stream import assert_same
from tests.support.speech import WIDTH, cut, made_up

# Token ids of the seeded tokenizer.
START, USER, ASSISTANT, NEWLINE = 1, 766, 767, 212


@dataclass(frozen=True)
class Ask:
    """A speech request; its chunks have ``sizes`` rows of the reply, cyclically."""

    family: int
    num_prompt: int
    num_reply: int
    places: bool
    speaker: str
    max_tokens: int
    sizes: tuple[int, ...] = (1000,)
    priority: int = 0

    @property
    def prompt(self) -> SpeechPrompt:
        return made_up(
            self.family, self.num_prompt, self.num_reply, places=self.places, speaker=self.speaker
        )

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=0.0, max_tokens=self.max_tokens, ignore_eos=True, logprobs=2
        )

    @property
    def whole(self) -> Ask:
        return replace(self, sizes=(1000,), priority=0)


@dataclass(frozen=True)
class Speech(Ask):
    """A request for several codes per step: ``num_prompt`` + 5 rows; greedy or sampled."""

    @property
    def prompt(self) -> SpeechPrompt:
        ids = (START, USER, *range(300, 300 + self.num_prompt), START, ASSISTANT, NEWLINE)
        plain = made_up(self.family, len(ids), self.num_reply, places=self.places)
        return replace(plain, speaker=self.speaker, prompt_ids=ids)

    @property
    def params(self) -> SamplingParams:
        drawn: dict[str, Any] = {"temperature": 1.0, "seed": self.num_reply} if self.family else {}
        return super().params.model_copy(update=drawn)


# Token budgets of a step; small by default, so that prompts are chunked.
BUDGETS = (8, 16, 512)
ASKS = st.builds(
    Ask,
    family=st.integers(0, 1),
    num_prompt=st.integers(1, 18),
    num_reply=st.integers(0, 9),
    places=st.booleans(),
    speaker=st.sampled_from(["Chelsie", "Ethan"]),
    max_tokens=st.integers(0, 12),
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any).map(tuple),
    priority=st.integers(0, 1),
)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), ASKS),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("budget"), st.sampled_from(BUDGETS)),
        st.tuples(st.sampled_from(["feed", "pause", "resume", "abort"]), st.integers(0, 7)),
    ),
    min_size=4,
    max_size=40,
)
Alone = Callable[[Ask], RequestOutput]


@dataclass(frozen=True)
class Talker:
    """An engine with a small pool, and the uncached answer to each speech alone."""

    engine: LLMEngine
    alone: Alone
    kind: type[Ask]


@pytest.fixture(scope="module")
def alone(seeded: Callable[[str], str]) -> Callable[[str], Alone]:
    @cache
    def of(name: str) -> Alone:
        config = EngineConfig(
            model=seeded(name),
            part="talker",
            max_model_len=64,
            max_num_seqs=1,
            enable_prefix_caching=False,
        )
        engine = LLMEngine(config)
        return cache(lambda ask: engine.generate(ask.prompt, ask.params)[0])

    return of


KINDS = [
    *(("qwen2_5_omni", 4, preemption) for preemption in ("recompute", "swap")),
    *(("qwen3_omni", 4, preemption) for preemption in ("recompute", "swap")),
    *(("qwen3_omni", 16, preemption) for preemption in ("recompute", "swap")),
]
ONE_CODE = pytest.mark.parametrize("talker", KINDS[:2], indirect=True, ids=str)
SEVERAL_CODES = pytest.mark.parametrize("talker", KINDS[2:], indirect=True, ids=str)


@pytest.fixture(scope="module", params=KINDS, ids=str)
def talker(
    request: pytest.FixtureRequest, seeded: Callable[[str], str], alone: Callable[[str], Alone]
) -> Talker:
    name, block_size, preemption = request.param
    config = EngineConfig(
        model=seeded(name),
        part="talker",
        block_size=block_size,
        num_blocks=64 // block_size + 1,
        max_model_len=44,
        max_num_seqs=4,
        max_num_batched_tokens=max(BUDGETS),
        preemption=preemption,
    )
    return Talker(LLMEngine(config), alone(name), Ask if name == "qwen2_5_omni" else Speech)


@dataclass
class Stream:
    """Requests of an engine, with the chunks that are still to be sent."""

    talker: Talker
    asks: list[Ask] = field(default_factory=list)
    to_come: dict[str, list[SpeechPrompt]] = field(default_factory=dict)
    paused: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.run("budget", BUDGETS[0])

    def add(self, ask: Ask) -> str:
        name = str(len(self.asks))
        self.asks.append(ask)
        first, *rest = cut(ask.prompt, ask.sizes)
        self.talker.engine.add_request(name, first, ask.params, priority=ask.priority)
        self.to_come[name] = rest
        return name

    def feed(self, name: str) -> None:
        if self.to_come[name]:
            self.talker.engine.extend_request(name, self.to_come[name].pop(0))

    def step(self) -> list[RequestOutput]:
        outputs = self.talker.engine.step()
        self.talker.engine.check_integrity()
        for output in outputs:
            name = output.request_id
            assert name in self.to_come and name not in self.paused
            if output.finished:
                del self.to_come[name]
                assert_same(output, self.talker.alone(self.asks[int(name)].whole))
            else:
                self._check_partial(output)
        return list(outputs)

    def _check_partial(self, output: RequestOutput) -> None:
        rows = self.talker.engine.partial_outputs(output.request_id, 2).get("hidden_states")
        expected = self.talker.alone(self.asks[int(output.request_id)].whole).outputs[0]
        ids = output.outputs[0].token_ids
        # After a near tie the two may have diverged.
        if rows is not None and ids == expected.token_ids[: len(ids)]:
            theirs = expected.tensors["hidden_states"][2 : 2 + len(rows)]
            torch.testing.assert_close(rows, theirs, atol=1e-5, rtol=0)

    def finish(self) -> None:
        """Feed the requests that need input until all are finished."""
        for name in tuple(self.paused):
            self.talker.engine.resume(name)
        self.paused.clear()
        num_idle = 0
        while self.to_come:
            needy = [name for name in self.to_come if self.talker.engine.needs_input(name)]
            for name in needy:
                assert self.to_come[name], "a request with all its rows wants more"
                self.feed(name)
            # A few steps may give no output: chunks of a prompt, or preemptions.
            num_idle = 0 if self.step() or needy else num_idle + 1
            assert num_idle < 20, "the engine stands still"
        assert not self.talker.engine.has_unfinished_requests
        kv = self.talker.engine.stats().kv
        assert kv is not None and kv.held == 0

    def run(self, event: str, argument: Ask | int) -> None:
        if isinstance(argument, Ask):
            self.add(self.talker.kind(**vars(argument)))
        elif event == "step":
            for _ in range(argument):
                self.step()
        elif event == "budget":
            self.talker.engine._scheduler._max_num_batched_tokens = argument
        elif self.to_come:
            name = list(self.to_come)[argument % len(self.to_come)]
            if event == "feed":
                self.feed(name)
            elif event == "pause":
                self.talker.engine.pause(name)
                self.paused.add(name)
            elif event == "resume":
                self.talker.engine.resume(name)
                self.paused.discard(name)
            else:
                self.talker.engine.abort(name)
                del self.to_come[name]
                self.paused.discard(name)
                self.talker.engine.check_integrity()


@settings(max_examples=examples(30))
@given(events=EVENTS)
def test_random_streams_equal_whole_ones(
    talker: Talker, events: list[tuple[str, Ask | int]]
) -> None:
    stream = Stream(talker)
    for event, argument in events:
        stream.run(event, argument)
    stream.finish()


@ONE_CODE
def test_streams_hit_and_preempt_waiting_requests(talker: Talker) -> None:
    """Guards the property above against being vacuous."""
    engine = talker.engine
    before = engine.stats()
    stream = Stream(talker)
    # It has priority, and grows until it needs blocks of the others.
    growing = stream.add(Ask(2, 3, 9, False, "Ethan", 30, priority=-1))
    waiting = [stream.add(Ask(i, 16, 9, True, "Ethan", 12, (1,))) for i in range(2)]
    for _ in range(40):
        stream.step()
    assert growing not in stream.to_come
    assert engine.stats().num_preemptions > before.num_preemptions
    assert all(engine.needs_input(name) for name in waiting)
    assert stream.step() == []
    stream.finish()
    stream.add(Ask(1, 16, 9, True, "Ethan", 12, (1,)))
    stream.finish()
    assert engine.stats().cached_tokens > before.cached_tokens


def _num_rows(engine: LLMEngine, name: str) -> int:
    rows = engine.partial_outputs(name, 0)
    return rows["hidden_states"].shape[0] if rows else 0


@ONE_CODE
@pytest.mark.parametrize("size", [1, 2, 5])
def test_no_token_runs_ahead_of_its_row(talker: Talker, size: int) -> None:
    engine = talker.engine
    ask = Ask(0, 9, 7, True, "Chelsie", 10, (size,))
    stream = Stream(talker)
    name = stream.add(ask)
    num_known = size
    while stream.to_come[name]:
        num_rows = -1
        # A step without an output may still have computed a part of the prompt.
        while num_rows != (num_rows := _num_rows(engine, name)):
            while stream.step():
                pass
        # The first row is the codec's begin token; each further one gives a code.
        assert num_rows == 9 + 1 + min(num_known, 7)
        assert engine.needs_input(name)
        stream.feed(name)
        num_known += size
    stream.finish()


@ONE_CODE
def test_a_paused_request_does_not_run_while_others_do(talker: Talker) -> None:
    engine = talker.engine
    stream = Stream(talker)
    resting = stream.add(Ask(0, 9, 3, False, "Chelsie", 8))
    stream.step()
    stream.step()
    engine.pause(resting)
    engine.pause(resting)
    stream.paused.add(resting)
    held = engine.partial_outputs(resting, 0)["hidden_states"].shape[0]
    # The same prompt: it must not wait for blocks of the paused request.
    stream.add(Ask(0, 9, 3, False, "Ethan", 8))
    while "1" in stream.to_come:
        stream.step()
    assert stream.step() == []
    assert engine.partial_outputs(resting, 0)["hidden_states"].shape[0] == held
    waiting = stream.add(Ask(1, 9, 3, False, "Ethan", 8))
    engine.pause(waiting)
    assert stream.step() == [] and engine.partial_outputs(waiting, 0) == {}
    engine.resume(waiting)
    engine.resume("nobody")
    stream.finish()


@dataclass(frozen=True)
class OtherReply(Ask):
    """A request with the prompt of its family, but the reply of the next family."""

    @property
    def prompt(self) -> SpeechPrompt:
        others = made_up(self.family + 1, 1, self.num_reply)
        return replace(super().prompt, reply_rows=others.reply_rows)


@ONE_CODE
def test_blocks_are_not_keyed_before_all_their_rows_are_known(talker: Talker) -> None:
    """The second block of both ends with a token whose row arrives later, and differs::

    tokens   [ mask mask mask mask ] [ mask mask pad bos ] codes ...
    rows     [   known, and equal  ] [   equal       ^ differ
    """
    engine = talker.engine
    engine.reset_prefix_cache()
    stream = Stream(talker)
    first = stream.add(Ask(5, 6, 11, False, "Ethan", 20, (0, 4)))
    stream.step()
    second = stream.add(OtherReply(5, 6, 14, False, "Ethan", 20, (0, 12)))
    stream.step()
    for name in (second, first):
        stream.feed(name)
        while stream.step():
            pass
    before = engine.stats().num_preemptions
    growing = stream.add(Ask(2, 3, 9, False, "Ethan", 34, priority=-1))
    while growing in stream.to_come:
        stream.step()
    assert engine.stats().num_preemptions > before
    stream.finish()


@SEVERAL_CODES
def test_streams_of_several_codes_preempt_and_hit(talker: Talker) -> None:
    """Guards the property above against being vacuous."""
    engine = talker.engine
    before = engine.stats()
    stream = Stream(talker)
    for number in range(3):
        stream.add(Speech(1, 14, 5 + number, True, "Ethan", 18))
    stream.finish()
    stream.add(Speech(1, 14, 5, True, "Ethan", 18))
    stream.finish()
    after = engine.stats()
    assert after.num_preemptions > before.num_preemptions
    assert after.cached_tokens > before.cached_tokens


@SEVERAL_CODES
def test_codes_are_those_of_each_token_and_key_its_blocks(talker: Talker) -> None:
    engine = talker.engine
    ask = Speech(1, 6, 9, False, "Ethan", 12)
    (first,) = engine.generate(ask.prompt, ask.params)
    assert_same(first, talker.alone(ask))
    codes, ids = first.outputs[0].tensors["codes"], first.outputs[0].token_ids
    generated = codes[first.num_prompt_tokens :]
    assert generated[:, 0].tolist() == list(ids) and generated.shape[1] == 4
    assert (codes[: first.num_prompt_tokens, 1:] == -1).all()
    assert len({tuple(row) for row in generated[:, 1:].tolist()}) > 4
    other = replace(ask, num_reply=8)
    (second,) = engine.generate(other.prompt, other.params)
    assert_same(second, talker.alone(other))
    assert not torch.equal(second.outputs[0].tensors["codes"], codes)


@pytest.mark.parametrize("talker", KINDS[2:3], indirect=True, ids=str)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": ()}, "prompt_ids must be 11"),
        ({"prompt_ids": (5,) * 11}, "no assistant's turn"),
        (
            {"prompt_ids": (*(5,) * 7, START, ASSISTANT, NEWLINE, 5)},
            r"turn \(3 tokens\), but ends with 4",
        ),
        ({"speaker": "Ethna"}, "did you mean 'Ethan'"),
        ({"prompt_rows": torch.zeros(0, 64), "prompt_ids": ()}, "prompt is empty"),
    ],
    ids=str,
)
def test_invalid_prompts_for_several_codes_are_refused(
    talker: Talker, change: dict[str, Any], message: str
) -> None:
    engine = talker.engine
    prompt = Speech(0, 6, 4, False, "Ethan", 3).prompt
    with pytest.raises(ValueError, match=message):
        engine.generate(replace(prompt, **change), SamplingParams(max_tokens=3))


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
    """The engine with one request that has received its first chunk."""
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
def test_invalid_prompts_are_refused(engine: LLMEngine, prompt: Prompt, message: str) -> None:
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
    assert finish_one(live, "live") == expected
    live.check_integrity()


def test_the_last_chunk_is_the_last(live: LLMEngine) -> None:
    live.extend_request("live", SpeechPrompt(NONE, NONE))
    for is_last in (True, False):
        with pytest.raises(ValueError, match="ended"):
            live.extend_request("live", SpeechPrompt(NONE, NONE, is_last=is_last))
    assert finish_one(live, "live") == live_engine_answer(live, WHOLE)


def test_a_request_that_waits_for_rows_can_be_aborted(live: LLMEngine) -> None:
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
    finish_one(live, "short")
    for chunk in rest:
        live.extend_request("short", chunk)
    assert not live.needs_input("short")
    live.check_integrity()


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


def test_stop_tokens_end_a_speech_and_the_begin_token_is_never_generated(engine: LLMEngine) -> None:
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


def test_other_models_refuse_speech_prompts(seeded: Callable[[str], str]) -> None:
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
    """Return the answer to a whole prompt while others are live."""
    engine.add_request("other", prompt, GREEDY)
    return finish_one(engine, "other")


def finish_one(engine: LLMEngine, request_id: str) -> tuple[int, ...]:
    while True:
        for output in engine.step():
            if output.finished and output.request_id == request_id:
                assert output.error is None
                return output.outputs[0].token_ids
