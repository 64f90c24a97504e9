"""A thinker's caches: what hits, what never does, and that nothing shows it but the work saved.

All three tensors that it hands on are mirrored, integers among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import EngineConfig, LLMEngine, RequestOutput, SamplingParams, TokensPrompt
from engine.mm_input import Modality
from prefix_cache import EncoderCacheStats
from tests.support.pictures import picture
from tests.support.request_stream import BLOCK_SIZE, Alone, Script, run_stream
from tests.support.thinker_asks import (
    KINDS,
    PLACEHOLDERS,
    ThinkerAsk,
    TowerRuns,
    shows,
    thinker_scripts,
)
from tests.support.thinker_reference import Talk, clip, tone

ROW_BYTES = 64 * 4
NOTHING = SamplingParams(temperature=0.0, max_tokens=0)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
# Six rows each, as alike as two of a kind can be.
PAIRS: dict[Modality, tuple[Any, Any]] = {
    "image": (picture(0), picture(1)),
    "audio": (tone(0.25), tone(0.25, 2000.0)),
    "video": (clip(0, grids=1), clip(1, grids=1)),
}


def build(checkpoint: str, **changed: Any) -> LLMEngine:
    usual = {"block_size": BLOCK_SIZE, "num_blocks": 64, "max_num_seqs": 4, "max_model_len": 200}
    return LLMEngine(EngineConfig(model=checkpoint, part="thinker", **(usual | changed)))


@pytest.fixture(scope="module")
def checkpoint(seeded: Callable[[str], str]) -> str:
    return seeded("qwen2_5_omni")


@pytest.fixture(scope="module")
def shared_engine(checkpoint: str) -> LLMEngine:
    return build(checkpoint)


@pytest.fixture(scope="module")
def uncached(checkpoint: str) -> LLMEngine:
    return build(checkpoint, enable_prefix_caching=False)


@pytest.fixture
def engine(shared_engine: LLMEngine) -> Iterator[LLMEngine]:
    shared_engine.reset_prefix_cache()
    yield shared_engine
    shared_engine.check_integrity()
    assert encoder_stats(shared_engine).held_bytes == 0


@pytest.fixture
def towers(monkeypatch: pytest.MonkeyPatch) -> TowerRuns:
    return TowerRuns(monkeypatch)


def encoder_stats(engine: LLMEngine) -> EncoderCacheStats:
    stats = engine.stats().encoder_cache
    assert stats is not None
    return stats


def run(engine: LLMEngine, prompt: TokensPrompt) -> RequestOutput:
    (output,) = engine.generate(prompt, GREEDY)
    assert output.error is None
    return output


def assert_same(output: RequestOutput, expected: RequestOutput) -> None:
    ours, theirs = output.outputs[0], expected.outputs[0]
    assert ours.token_ids == theirs.token_ids
    assert ours.tensors.keys() == {"hidden_states", "token_embeds", "position_ids"}
    for name, rows in theirs.tensors.items():
        assert len(rows) == len(expected.prompt_token_ids) + 5
        torch.testing.assert_close(ours.tensors[name], rows, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_item_that_straddles_a_block_border(
    kind: Modality, engine: LLMEngine, uncached: LLMEngine, towers: TowerRuns
) -> None:
    """The block that an item fills hits, the rest of it comes from the encoder cache::

    [ ~0 ~1 ~2 ~3 ] [ ~4 ~5 foo <empty> ]
    [ ~0 ~1 ~2 ~3 ] [ ~4 ~5 bar   baz   ]
    """
    first = shows(engine, (kind, PAIRS[kind][0]), 101)
    second = shows(engine, (kind, PAIRS[kind][0]), 102, 103)
    expected = run(uncached, second)
    runs = towers.heard if kind == "audio" else towers.seen
    runs.clear()
    assert run(engine, first).num_cached_tokens == 0
    output = run(engine, second)
    assert output.num_cached_tokens == 4
    assert runs == [1]
    assert_same(output, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_an_item_elsewhere_is_no_hit_but_is_not_encoded_again(
    kind: Modality, engine: LLMEngine, uncached: LLMEngine, towers: TowerRuns
) -> None:
    shown = (kind, PAIRS[kind][0])
    moved = shows(engine, 5, 6, shown, 7)
    expected = run(uncached, moved)
    towers.heard.clear()
    towers.seen.clear()
    run(engine, shows(engine, 5, shown, 6, 7))
    output = run(engine, moved)
    assert output.num_cached_tokens == 0
    assert len(towers.heard) + len(towers.seen) == 1
    assert_same(output, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_an_equally_long_other_item_never_hits(
    kind: Modality, engine: LLMEngine, uncached: LLMEngine
) -> None:
    one, other = (shows(engine, (kind, item), 25, 26, 27) for item in PAIRS[kind])
    assert one.prompt_token_ids == other.prompt_token_ids
    expected = run(uncached, other)
    run(engine, one)
    output = run(engine, other)
    assert output.num_cached_tokens == 0
    assert_same(output, expected)
    assert run(engine, one).num_cached_tokens == 8


def test_the_same_frames_at_another_pace_never_hit(engine: LLMEngine) -> None:
    """Their rows are equal, but their places are not."""
    slow, fast = clip(0, seconds=2.0), clip(0, seconds=0.5)
    assert torch.equal(slow.pixel_values_videos, fast.pixel_values_videos)
    run(engine, shows(engine, ("video", slow), 7))
    assert run(engine, shows(engine, ("video", fast), 7)).num_cached_tokens == 0


def test_a_conversation_that_goes_on_runs_no_tower(
    engine: LLMEngine, uncached: LLMEngine, towers: TowerRuns
) -> None:
    opening: list[Any] = [tone(0.5), "and", picture(0), "What is it?"]
    turns = [Talk(opening), Talk(opening, ("A harbour.", "Are you sure?"))]
    (expected,) = uncached.generate(turns[1].prompt, GREEDY)
    towers.heard.clear()
    towers.seen.clear()
    (first,) = engine.generate(turns[0].prompt, GREEDY)
    assert (towers.heard, towers.seen) == ([1], [1])
    (second,) = engine.generate(turns[1].prompt, GREEDY)
    assert (towers.heard, towers.seen) == ([1], [1])
    assert second.num_cached_tokens is not None
    assert second.num_cached_tokens >= len(first.prompt_token_ids) - 2 * BLOCK_SIZE
    assert_same(second, expected)


def test_one_run_of_a_tower_takes_the_items_of_all_requests(
    engine: LLMEngine, towers: TowerRuns
) -> None:
    prompts = [
        shows(engine, 5, ("audio", tone(0.25)), 6),
        shows(engine, 7, ("audio", tone(0.3)), ("image", picture(0)), 6),
        shows(engine, 10, ("audio", tone(0.25)), ("image", picture(2)), 6),
    ]
    engine.generate(prompts, GREEDY)
    assert (towers.heard, towers.seen) == ([2], [2])


def test_salts_share_no_sound(engine: LLMEngine, towers: TowerRuns) -> None:
    for name, salt in [("a", None), ("b", "x"), ("c", "x")]:
        prompt = shows(engine, ("audio", tone(0.25)), 7)
        engine.add_request(name, prompt, NOTHING, cache_salt=salt)
        engine.step()
    assert towers.heard == [1, 1]


@dataclass(frozen=True)
class Stream:
    engine: LLMEngine
    alone: Alone
    placeholders: tuple[int, ...]


@pytest.fixture(scope="module", params=["recompute", "swap"])
def stream(request: pytest.FixtureRequest, checkpoint: str) -> Stream:
    preemption: Literal["recompute", "swap"] = request.param
    engine = build(
        checkpoint,
        num_blocks=14,
        max_model_len=48,
        max_num_batched_tokens=16,
        max_num_encoder_tokens=13,
        encoder_cache_bytes=18 * ROW_BYTES,
        preemption=preemption,
    )
    assert engine.tokenizer is not None
    ids = engine.tokenizer.convert_tokens_to_ids([PLACEHOLDERS[kind] for kind in KINDS])
    return Stream(engine, Alone(checkpoint, part="thinker"), tuple(ids))


@settings(max_examples=40)
@given(data=st.data())
def test_random_streams_equal_uncached_and_conserve_items(
    stream: Stream, data: st.DataObject
) -> None:
    run_stream(stream.engine, data.draw(thinker_scripts(stream.placeholders, 16)), stream.alone)
    assert encoder_stats(stream.engine).held_bytes == 0


def test_streams_do_hit_evict_and_preempt(stream: Stream) -> None:
    """Else the property above would prove nothing."""

    def ask(number: int, max_tokens: int) -> ThinkerAsk:
        kind = number % 3
        return ThinkerAsk(
            family=number % 2,
            length=4 + number % 8,
            tail=number,
            max_tokens=max_tokens,
            as_embeds=False,
            seeded=False,
            priority=0,
            salt=None,
            placeholders=stream.placeholders,
            shown=((2, kind, number % 2), (6, (kind + 1) % 3, 0)),
        )

    script: Script = [("add", ask(number // 2, 9)) for number in range(12)]
    growing: Script = [("add", ask(number, 20)) for number in range(8)]
    before, encoder_before = stream.engine.stats(), encoder_stats(stream.engine)
    run_stream(stream.engine, [*script, *script, *growing], stream.alone)
    after, encoder_after = stream.engine.stats(), encoder_stats(stream.engine)
    assert before.kv is not None and after.kv is not None
    assert after.cached_tokens > before.cached_tokens
    assert after.kv.evictions > before.kv.evictions
    assert after.num_preemptions > before.num_preemptions
    assert encoder_after.hits > encoder_before.hits
    assert encoder_after.evictions > encoder_before.evictions
