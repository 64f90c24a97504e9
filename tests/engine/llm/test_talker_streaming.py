"""A talker whose rows come in chunks says what it says when they come at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import EngineConfig, LLMEngine, RequestOutput, SamplingParams, SpeechPrompt
from tests.support.examples import examples
from tests.support.request_stream import assert_same
from tests.support.speech import cut, made_up

BLOCK_SIZE = 4


@dataclass(frozen=True)
class Ask:
    """A speech and how it comes: ``sizes`` rows of the reply a chunk, in turns."""

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
            self.family,
            self.num_prompt,
            self.num_reply,
            places=self.places,
            speaker=self.speaker,
        )

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=0.0, max_tokens=self.max_tokens, ignore_eos=True, logprobs=2
        )

    @property
    def whole(self) -> Ask:
        return Ask(
            self.family,
            self.num_prompt,
            self.num_reply,
            self.places,
            self.speaker,
            self.max_tokens,
        )


ASKS = st.builds(
    Ask,
    family=st.integers(0, 1),
    num_prompt=st.integers(1, 24),
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
    max_size=40,
)


@pytest.fixture(scope="module")
def folder(seeded: Callable[[str], str]) -> str:
    return seeded("qwen2_5_omni")


@pytest.fixture(scope="module", params=["recompute", "swap"])
def engine(request: pytest.FixtureRequest, folder: str) -> LLMEngine:
    preemption: Literal["recompute", "swap"] = request.param
    return LLMEngine(
        EngineConfig(
            model=folder,
            part="talker",
            block_size=BLOCK_SIZE,
            num_blocks=17,
            max_model_len=44,
            max_num_seqs=4,
            max_num_batched_tokens=8,
            preemption=preemption,
        )
    )


Alone = Callable[[Ask], RequestOutput]


@pytest.fixture(scope="module")
def alone(folder: str) -> Alone:
    """A whole speech, by itself and without a cache."""
    engine = LLMEngine(
        EngineConfig(
            model=folder,
            part="talker",
            block_size=BLOCK_SIZE,
            max_model_len=64,
            max_num_seqs=1,
            enable_prefix_caching=False,
        )
    )
    return cache(lambda ask: engine.generate(ask.prompt, ask.params)[0])


@dataclass
class Stream:
    """Requests of an engine, some of whose chunks are still to come."""

    engine: LLMEngine
    alone: Alone
    asks: list[Ask] = field(default_factory=list)
    to_come: dict[str, list[SpeechPrompt]] = field(default_factory=dict)
    paused: set[str] = field(default_factory=set)

    def add(self, ask: Ask) -> str:
        name = str(len(self.asks))
        self.asks.append(ask)
        first, *rest = cut(ask.prompt, ask.sizes)
        self.engine.add_request(name, first, ask.params, priority=ask.priority)
        self.to_come[name] = rest
        return name

    def feed(self, name: str) -> None:
        if self.to_come[name]:
            self.engine.extend_request(name, self.to_come[name].pop(0))

    def step(self) -> list[RequestOutput]:
        outputs = self.engine.step()
        self.engine.check_integrity()
        for output in outputs:
            name = output.request_id
            assert name in self.to_come and name not in self.paused
            if output.finished:
                del self.to_come[name]
                assert_same(output, self.alone(self.asks[int(name)].whole))
            else:
                self._check_partial(output)
        return list(outputs)

    def _check_partial(self, output: RequestOutput) -> None:
        rows = self.engine.partial_outputs(output.request_id, 2).get("hidden_states")
        expected = self.alone(self.asks[int(output.request_id)].whole).outputs[0]
        ids = output.outputs[0].token_ids
        # After a near tie the two have gone different ways.
        if rows is not None and ids == expected.token_ids[: len(ids)]:
            theirs = expected.tensors["hidden_states"][2 : 2 + len(rows)]
            torch.testing.assert_close(rows, theirs, atol=1e-5, rtol=0)

    def finish(self) -> None:
        """Feed whoever needs it until all are done."""
        for name in tuple(self.paused):
            self.engine.resume(name)
        self.paused.clear()
        num_idle = 0
        while self.to_come:
            needy = [name for name in self.to_come if self.engine.needs_input(name)]
            for name in needy:
                assert self.to_come[name], "a request with all its rows wants more"
                self.feed(name)
            # Two steps at most move nobody: chunks of a prompt, or room made for others.
            num_idle = 0 if self.step() or needy else num_idle + 1
            assert num_idle < 20, "the engine stands still"
        assert not self.engine.has_unfinished_requests
        kv = self.engine.stats().kv
        assert kv is not None and kv.held == 0

    def run(self, event: str, argument: Ask | int) -> None:
        if isinstance(argument, Ask):
            self.add(argument)
        elif event == "step":
            for _ in range(argument):
                self.step()
        elif self.to_come:
            name = list(self.to_come)[argument % len(self.to_come)]
            if event == "feed":
                self.feed(name)
            elif event == "pause":
                self.engine.pause(name)
                self.paused.add(name)
            elif event == "resume":
                self.engine.resume(name)
                self.paused.discard(name)
            else:
                self.engine.abort(name)
                del self.to_come[name]
                self.paused.discard(name)
                self.engine.check_integrity()


@settings(max_examples=examples(60))
@given(events=EVENTS)
def test_random_streams_equal_whole_ones(
    engine: LLMEngine, alone: Alone, events: list[tuple[str, Ask | int]]
) -> None:
    stream = Stream(engine, alone)
    for event, argument in events:
        stream.run(event, argument)
    stream.finish()


def test_streams_do_hit_and_preempt_who_waits(engine: LLMEngine, alone: Alone) -> None:
    """Else the property above would prove less."""
    before = engine.stats()
    stream = Stream(engine, alone)
    # First in the order, it grows into what the others hold.
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


@pytest.mark.parametrize("size", [1, 2, 5])
def test_no_token_runs_ahead_of_its_row(engine: LLMEngine, alone: Alone, size: int) -> None:
    ask = Ask(0, 9, 7, True, "Chelsie", 10, (size,))
    stream = Stream(engine, alone)
    name = stream.add(ask)
    num_known = size
    while stream.to_come[name]:
        num_rows = -1
        # A step that puts nothing out may still have computed a part of the prompt.
        while num_rows != (num_rows := _num_rows(engine, name)):
            while stream.step():
                pass
        # The first row is that of the codec token that begins; each further one gives a code.
        assert num_rows == 9 + 1 + min(num_known, 7)
        assert engine.needs_input(name)
        stream.feed(name)
        num_known += size
    stream.finish()


def test_a_paused_request_rests_and_others_go_on(engine: LLMEngine, alone: Alone) -> None:
    stream = Stream(engine, alone)
    resting = stream.add(Ask(0, 9, 3, False, "Chelsie", 8))
    stream.step()
    stream.step()
    engine.pause(resting)
    engine.pause(resting)
    stream.paused.add(resting)
    held = engine.partial_outputs(resting, 0)["hidden_states"].shape[0]
    # The same prompt: it must not wait for blocks that nobody computes.
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
    """The prompt of its family, but the reply of the next one."""

    @property
    def prompt(self) -> SpeechPrompt:
        others = made_up(self.family + 1, 1, self.num_reply)
        return replace(super().prompt, reply_rows=others.reply_rows)

    @property
    def whole(self) -> Ask:
        return replace(self, sizes=(1000,))


def test_blocks_are_not_keyed_before_all_their_rows_are_known(
    engine: LLMEngine, alone: Alone
) -> None:
    """Both fill their second block with a token whose row comes later, and is not the same::

    tokens   [ mask mask mask mask ] [ mask mask pad bos ] codes ...
    rows     [   known, and alike  ] [   alike       ^ differ
    """
    engine.reset_prefix_cache()
    stream = Stream(engine, alone)
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
