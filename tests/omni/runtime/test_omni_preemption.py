"""Requests preempted by thinker and talker, while the one still feeds the other, lose nothing.

The pools hold one long request and a bit: when several run, some must release their blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from engine import TokensPrompt
from engine.requests.request import Request
from engine.scheduling.request_queues import RequestQueues
from omni import Omni, OmniOutput, OmniRequest
from omni.pipelines.pipeline import Pipeline
from omni.seeded.omni import OMNI_SPEAKERS
from prefix_cache import PageCopy
from stages import AutoregressiveStage
from tests.support.examples import examples
from tests.support.omni_stages import (
    assert_all_as_alone,
    assert_same,
    build_pipeline,
    only_output,
    sound,
)
from tests.support.pictures import picture
from tests.support.placed import PLACES, place
from tests.support.whole_orchestrator import WholeOrchestrator

BLOCK_SIZE = 4
MAX_TEXT, MAX_CODES = 16, 24


@dataclass(frozen=True)
class Ask:
    """A request for ``num_text`` tokens of text, exactly, and up to ``num_codes`` of speech."""

    family: int
    tail: int
    picture: int | None
    sound: int | None
    num_text: int
    num_codes: int
    speaker: int = 0
    priority: int = 0
    salt: str | None = None

    def request(self, request_id: str, placeholders: dict[str, int]) -> OmniRequest:
        ids = [100 + self.family, *range(20, 26)]
        items: dict[str, list[Any]] = {}
        if self.picture is not None:
            ids.append(placeholders["image"])
            items["image"] = [picture(self.picture)]
        if self.sound is not None:
            ids += [30, placeholders["audio"]]
            items["audio"] = [sound(self.sound)]
        return OmniRequest(
            TokensPrompt((*ids, *range(40, 40 + self.tail)), items),
            request_id=request_id,
            speaker=OMNI_SPEAKERS[self.speaker],
            priority=self.priority,
            cache_salt=self.salt,
            sampling={
                "thinker": {"max_tokens": self.num_text, "ignore_eos": True},
                "talker": {"max_tokens": self.num_codes},
            },
        )


@dataclass(frozen=True)
class Rig:
    """A cached pipeline on pools that are too small, and the uncached answer of each ask alone."""

    pipeline: Pipeline
    placeholders: dict[str, int]
    answer: Callable[[Ask], OmniOutput]
    swaps: bool
    num_examples: int


USUAL: dict[str, Any] = {"num_steps": 2, "block_size": BLOCK_SIZE, "max_model_len": 60}


@pytest.fixture(scope="module")
def placeholders(seeded: Callable[[str], str]) -> dict[str, int]:
    """The token ids of placeholders for pictures and sounds."""
    vocabulary = AutoTokenizer.from_pretrained(seeded("qwen2_5_omni")).get_vocab()
    return {"image": vocabulary["<|IMAGE|>"], "audio": vocabulary["<|AUDIO|>"]}


@pytest.fixture(scope="module")
def answer(
    seeded: Callable[[str], str], placeholders: dict[str, int]
) -> Callable[[Ask], OmniOutput]:
    uncached = build_pipeline(seeded("qwen2_5_omni"), caching=False, num_blocks=64, **USUAL)
    orchestrator = WholeOrchestrator(uncached)

    answer = cache(lambda ask: only_output(orchestrator, ask.request("alone", placeholders)))
    # Without a cache its answer does not depend on the order and on other requests.
    return lambda ask: answer(replace(ask, priority=0, salt=None))


@pytest.fixture(
    scope="module",
    params=[*product(PLACES, ("recompute", "swap"))],
    ids="-".join,
)
def rig(
    request: pytest.FixtureRequest,
    seeded: Callable[[str], str],
    placeholders: dict[str, int],
    answer: Callable[[Ask], OmniOutput],
) -> Iterator[Rig]:
    where, preemption = request.param
    # The codes come whole, so that the vocoder's windows cannot explain other sound.
    pipeline = build_pipeline(
        seeded("qwen2_5_omni"),
        streaming=True,
        text_chunk=2,
        code_chunk=MAX_CODES + 1,
        num_blocks=17,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        preemption=preemption,
        **USUAL,
    )
    pipeline = place(pipeline, where)
    num_examples = 10 if where == "inline" else 5
    yield Rig(pipeline, placeholders, answer, preemption == "swap", num_examples)
    pipeline.close()


def asks(
    pictures: st.SearchStrategy[int | None],
    num_text: st.SearchStrategy[int],
    num_codes: st.SearchStrategy[int],
) -> st.SearchStrategy[Ask]:
    return st.builds(
        Ask,
        family=st.integers(0, 1),
        tail=st.integers(1, 3),
        picture=pictures,
        sound=st.none() | st.integers(0, 1),
        num_text=num_text,
        num_codes=num_codes,
        speaker=st.integers(0, 1),
        priority=st.integers(0, 1),
        salt=st.sampled_from([None, None, "other"]),
    )


PICTURES = st.integers(0, 2)
LONG = asks(PICTURES, st.just(MAX_TEXT), st.just(MAX_CODES))
ANY = asks(st.none() | PICTURES, st.integers(0, MAX_TEXT), st.integers(0, MAX_CODES))
CROWD = 4
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), ANY),
        st.tuples(st.just("step"), st.integers(1, 8)),
        st.tuples(st.just("abort"), st.integers(0, CROWD + 2)),
    ),
    max_size=6,
)


@pytest.mark.hypothesis
def test_preempted_while_streaming_equals_the_uncached_whole(rig: Rig):
    @settings(max_examples=examples(rig.num_examples))
    @given(crowd=st.lists(LONG, min_size=CROWD, max_size=CROWD), events=EVENTS)
    def check(crowd: list[Ask], events: list[tuple[str, Any]]) -> None:
        script = [*(("add", ask) for ask in crowd), *events]
        assert_all_as_alone(
            rig.pipeline, script, lambda ask, name: ask.request(name, rig.placeholders), rig.answer
        )

    check()


def test_what_the_small_pools_preempt_does_stream(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """The property above would also hold for pools without any preemption."""
    parted: Counter[str] = Counter()
    copied: list[PageCopy] = []
    preempt = RequestQueues.preempt

    def noting(queues: RequestQueues, request: Request) -> tuple[PageCopy, ...]:
        for stage, other in (("thinker", "talker"), ("talker", "thinker")):
            is_in_both = request.request_id in engines[other]._live
            if queues is engines[stage]._scheduler._queues and is_in_both:
                parted[stage] += 1
        copies = preempt(queues, request)
        copied.extend(copies)
        return copies

    stages = rig.pipeline.stages
    engines = {
        name: stage.engine
        for name, stage in stages.items()
        if isinstance(stage, AutoregressiveStage)
    }
    before = {name: stages[name].stats().num_preemptions for name in ("thinker", "talker")}
    if engines:  # remote workers' stats show that they preempt, not when
        monkeypatch.setattr(RequestQueues, "preempt", noting)
    crowd = [Ask(n % 2, n, n % 3, n % 2, MAX_TEXT, MAX_CODES, salt=str(n)) for n in range(1, 5)]
    with Omni(rig.pipeline) as omni:
        requests = [ask.request(f"r{n}", rig.placeholders) for n, ask in enumerate(crowd)]
        for ask, output in zip(crowd, omni.generate(requests), strict=True):
            assert_same(output, rig.answer(ask))
        for name, count in before.items():
            assert stages[name].stats().num_preemptions > count
    if engines:
        assert parted["thinker"] and parted["talker"]
        assert bool(copied) == rig.swaps
