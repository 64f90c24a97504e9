"""A voice pipeline with its caches on says what it says with them off, whatever else happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni import Omni, OmniOutput
from omni.pipelines.pipeline import Pipeline
from tests.support.examples import examples
from tests.support.omni_stages import (
    Conversation,
    Turn,
    assert_all_as_alone,
    build_pipeline,
    conversations,
    only_output,
)
from tests.support.placed import PLACES, place
from tests.support.whole_orchestrator import WholeOrchestrator

BLOCK_SIZE = 8
RIGS = [*product(PLACES, ("whole", "streaming"))]
Answer = Callable[[Conversation], OmniOutput]
Script = list[tuple[str, Conversation | int]]


@dataclass(frozen=True)
class Rig:
    """A cached pipeline on small pools, and the uncached answer of each conversation alone."""

    pipeline: Pipeline
    answer: Answer
    num_examples: int


@pytest.fixture(scope="module")
def answers(seeded: Callable[[str], str]) -> Callable[[bool], Answer]:
    """What an uncached pipeline says to a conversation, by whether it streams."""

    @cache
    def of(streaming: bool) -> Answer:
        folder = seeded("qwen2_5_omni")
        uncached = build_pipeline(
            folder, streaming=streaming, caching=False, block_size=BLOCK_SIZE, max_num_seqs=2
        )
        orchestrator = WholeOrchestrator(uncached)

        return cache(lambda asked: only_output(orchestrator, asked.request("alone")))

    return of


@pytest.fixture(
    scope="module",
    params=RIGS,
    ids="-".join,
)
def rig(
    request: pytest.FixtureRequest,
    seeded: Callable[[str], str],
    answers: Callable[[bool], Answer],
) -> Iterator[Rig]:
    where, streaming = request.param[0], request.param[1] == "streaming"
    # The longest conversation takes about 20 blocks: pools in which few fit at once.
    pipeline = build_pipeline(
        seeded("qwen2_5_omni"),
        streaming=streaming,
        block_size=BLOCK_SIZE,
        num_blocks=48,
        max_model_len=320,
        max_num_seqs=4,
        max_num_batched_tokens=40,
        encoder_cache_bytes=6_000,  # three items of about 2,000
    )
    pipeline = place(pipeline, where)
    yield Rig(pipeline, answers(streaming), 12 if where == "inline" else 6)
    pipeline.close()


def scripts() -> st.SearchStrategy[Script]:
    return st.lists(
        st.one_of(
            st.tuples(st.just("add"), conversations()),
            st.tuples(st.just("step"), st.integers(1, 8)),
            st.tuples(st.just("abort"), st.integers(0, 12)),
        ),
        min_size=3,
        max_size=12,
    )


@pytest.mark.hypothesis
def test_cached_equals_uncached(rig: Rig):
    @settings(max_examples=examples(rig.num_examples))
    @given(script=scripts())
    def check(script: Script) -> None:
        assert_all_as_alone(rig.pipeline, script, Conversation.request, rig.answer)

    check()


@pytest.mark.parametrize("rig", RIGS[:2], indirect=True, ids="-".join)
def test_nine_identical_requests_in_a_row_give_identical_waveforms(rig: Rig):
    for stage in rig.pipeline.stages.values():
        stage.reset_prefix_cache()
    asked = Conversation((Turn(0, picture=0, sound=0),), speaker=1)
    orchestrator = WholeOrchestrator(rig.pipeline)
    waveforms = []
    for number in range(9):
        audio = only_output(orchestrator, asked.request(f"r{number}")).stages["code2wav"].audio
        assert audio is not None and len(audio.samples)
        waveforms.append(audio.samples)
    assert all(torch.equal(each, waveforms[0]) for each in waveforms)


def test_the_small_pools_do_hit_and_evict(rig: Rig):
    """The property above would hold for a pipeline that never hit."""
    with Omni(rig.pipeline) as omni:
        before = omni.stats()
        for system in (0, 1, 0):
            asked = [
                Conversation((Turn(0, picture=n % 3, sound=n % 2), Turn(n % 2)), system)
                for n in range(4)
            ]
            omni.generate([each.request(f"r{i}") for i, each in enumerate(asked)])
        for name in ("thinker", "talker"):
            spent = omni.stats()[name].since(before[name])
            assert 0 < spent.cached_tokens < spent.prompt_tokens
            assert spent.kv is not None and spent.kv.evictions > 0
            if name == "thinker":
                assert spent.kv.items is not None and spent.kv.items.evictions > 0
