"""A talker that draws several codes a step: cached, preempted and in chunks as alone and whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import EngineConfig, LLMEngine, SamplingParams, SpeechPrompt
from tests.engine.llm.test_talker_streaming import Alone, Ask, Stream
from tests.support.examples import examples
from tests.support.request_stream import assert_same
from tests.support.speech import made_up

# As the seeded tokenizer has them.
START, USER, ASSISTANT, NEWLINE = 1, 766, 767, 212


@dataclass(frozen=True)
class Speech(Ask):
    """A user's turn of ``num_prompt`` rows and two, and the reply, greedy or drawn."""

    @property
    def prompt(self) -> SpeechPrompt:
        ids = (START, USER, *range(300, 300 + self.num_prompt), START, ASSISTANT, NEWLINE)
        plain = made_up(self.family, len(ids), self.num_reply, places=self.places)
        return replace(plain, speaker=self.speaker, prompt_ids=ids)

    @property
    def params(self) -> SamplingParams:
        drawn: dict[str, Any] = {"temperature": 1.0, "seed": self.num_reply} if self.family else {}
        return super().params.model_copy(update=drawn)

    @property
    def whole(self) -> Ask:
        return replace(self, sizes=(1000,), priority=0)


ASKS = st.builds(
    Speech,
    family=st.integers(0, 1),
    num_prompt=st.integers(1, 16),
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
        st.tuples(st.sampled_from(["feed", "pause", "resume", "abort"]), st.integers(0, 7)),
    ),
    min_size=4,
    max_size=30,
)


@pytest.fixture(scope="module", params=[(4, "recompute"), (4, "swap"), (16, "recompute")], ids=str)
def engine(request: pytest.FixtureRequest, seeded: Callable[[str], str]) -> LLMEngine:
    block_size: int = request.param[0]
    preemption: Literal["recompute", "swap"] = request.param[1]
    return LLMEngine(
        EngineConfig(
            model=seeded("qwen3_omni"),
            part="talker",
            block_size=block_size,
            num_blocks=68 // block_size + 1,
            max_model_len=44,
            max_num_seqs=4,
            max_num_batched_tokens=8,
            preemption=preemption,
        )
    )


@pytest.fixture(scope="module")
def alone(seeded: Callable[[str], str]) -> Alone:
    """A whole speech, by itself and without a cache."""
    engine = LLMEngine(
        EngineConfig(
            model=seeded("qwen3_omni"),
            part="talker",
            max_model_len=64,
            max_num_seqs=1,
            enable_prefix_caching=False,
        )
    )
    return cache(lambda ask: engine.generate(ask.prompt, ask.params)[0])


@settings(max_examples=examples(12))
@given(events=EVENTS)
def test_random_streams_equal_whole_ones(
    engine: LLMEngine, alone: Alone, events: list[tuple[str, Ask | int]]
) -> None:
    stream = Stream(engine, alone)
    for event, argument in events:
        stream.run(event, argument)
    stream.finish()


def test_they_do_preempt_and_hit(engine: LLMEngine, alone: Alone) -> None:
    """Else the property above would prove less."""
    before = engine.stats()
    stream = Stream(engine, alone)
    for number in range(3):
        stream.add(Speech(1, 14, 5 + number, True, "Ethan", 18))
    stream.finish()
    stream.add(Speech(1, 14, 5, True, "Ethan", 18))
    stream.finish()
    after = engine.stats()
    assert after.num_preemptions > before.num_preemptions
    assert after.cached_tokens > before.cached_tokens


def test_codes_are_those_of_each_token_and_key_its_blocks(engine: LLMEngine, alone: Alone) -> None:
    ask = Speech(1, 6, 9, False, "Ethan", 12)
    (first,) = engine.generate(ask.prompt, ask.params)
    assert_same(first, alone(ask))
    codes, ids = first.outputs[0].tensors["codes"], first.outputs[0].token_ids
    generated = codes[first.num_prompt_tokens :]
    assert generated[:, 0].tolist() == list(ids[:-1]) and generated.shape[1] == 4
    assert (codes[: first.num_prompt_tokens, 1:] == -1).all()
    assert len({tuple(row) for row in generated[:, 1:].tolist()}) > 4
    other = replace(ask, num_reply=8)
    (second,) = engine.generate(other.prompt, other.params)
    assert_same(second, alone(other))
    assert not torch.equal(second.outputs[0].tensors["codes"], codes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": ()}, "prompt_ids must be 11"),
        ({"prompt_ids": (5,) * 11}, "no assistant's turn"),
        ({"prompt_ids": (*(5,) * 7, START, ASSISTANT, NEWLINE, 5)}, "begin 3 tokens behind"),
        ({"speaker": "Ethna"}, "did you mean 'Ethan'"),
        ({"prompt_rows": torch.zeros(0, 64), "prompt_ids": ()}, "prompt is empty"),
    ],
    ids=str,
)
def test_what_cannot_be_spoken_is_refused(
    engine: LLMEngine, change: dict[str, Any], message: str
) -> None:
    prompt = Speech(0, 6, 4, False, "Ethan", 3).prompt
    assert {field.name for field in fields(prompt)} >= change.keys()
    with pytest.raises(ValueError, match=message):
        engine.generate(replace(prompt, **change), SamplingParams(max_tokens=3))
