"""A voice pipeline with its caches on has the same output as with them off, whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

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

BUDGETS = (8, 40, 512)
Answer = Callable[[Conversation], OmniOutput]
Script = list[tuple[str, Conversation | int]]


class Way(NamedTuple):
    """How a pipeline is built and run."""

    model: str
    where: str
    streaming: str
    block_size: int = 8

    def build(self, folder: str, **settings: Any) -> Pipeline:
        return build_pipeline(
            folder,
            streaming=self.streaming == "streaming",
            is_qwen3=self.model == "qwen3_omni",
            block_size=self.block_size,
            **settings,
        )


STREAMING = ("whole", "streaming")
WAYS = [Way("qwen2_5_omni", *each) for each in product(PLACES, STREAMING)]
WAYS += [Way("qwen3_omni", "inline", *each) for each in product(STREAMING, (4, 16))]


@dataclass(frozen=True)
class Rig:
    """A cached pipeline on small pools, and the uncached answer of each conversation alone."""

    way: Way
    pipeline: Pipeline
    answer: Answer


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: "-".join(map(str, way)))
def rig(request: pytest.FixtureRequest, seeded: Callable[[str], str]) -> Iterator[Rig]:
    way: Way = request.param
    folder, is_swapped = seeded(way.model), way.block_size == 16
    uncached = WholeOrchestrator(way.build(folder, caching=False, max_num_seqs=2))
    # The longest conversation takes about 160 tokens: few fit into the pools at once.
    pipeline = way.build(
        folder,
        num_blocks=384 // way.block_size,
        max_model_len=320,
        max_num_seqs=4,
        max_num_batched_tokens=max(BUDGETS),
        preemption="swap" if is_swapped else "recompute",
        # Three items of about 2,000 bytes; a row of Qwen3-Omni is three times as wide.
        encoder_cache_bytes=None if is_swapped else 6_000 if way.block_size == 8 else 18_000,
    )
    pipeline = place(pipeline, way.where)
    yield Rig(way, pipeline, cache(lambda asked: only_output(uncached, asked.request("alone"))))
    pipeline.close()


def scripts(*, inline: bool) -> st.SearchStrategy[Script]:
    budgets = [st.tuples(st.just("budget"), st.sampled_from(BUDGETS))]
    return st.lists(
        st.one_of(
            st.tuples(st.just("add"), conversations()),
            st.tuples(st.just("step"), st.integers(1, 8)),
            st.tuples(st.just("abort"), st.integers(0, 12)),
            *(budgets if inline else ()),
        ),
        min_size=3,
        max_size=12,
    )


@pytest.mark.hypothesis
def test_cached_equals_uncached(rig: Rig):
    inline = rig.way.where == "inline"

    @settings(max_examples=examples(12 if inline else 6))
    @given(script=scripts(inline=inline))
    def check(script: Script) -> None:
        assert_all_as_alone(rig.pipeline, script, Conversation.request, rig.answer)

    check()


@pytest.mark.parametrize("rig", WAYS[:2], indirect=True, ids=lambda way: "-".join(map(str, way)))
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
    """The property above would also hold for a pipeline that never hit."""
    with Omni(rig.pipeline) as omni:
        before = omni.stats()
        for system in (0, 1, 0):
            asked = [
                Conversation((Turn(0, picture=n // 2, sound=n // 2), Turn(n // 2)), system)
                for n in range(6)
            ]
            omni.generate([each.request(f"r{i}") for i, each in enumerate(asked)])
        for name in ("thinker", "talker"):
            spent = omni.stats()[name].since(before[name])
            assert 0 < spent.cached_tokens < spent.prompt_tokens
            assert spent.kv is not None and spent.kv.evictions > 0
            if name == "thinker":
                assert spent.kv.items is not None and spent.kv.items.evictions > 0
