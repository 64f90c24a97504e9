"""A thinker's caches: what hits, what never does, and that nothing shows it but the work saved.

All three tensors that it hands on are mirrored, integers among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from engine import EngineConfig, LLMEngine, RequestOutput, SamplingParams, TokensPrompt
from engine.requests.encoder_input import Modality
from prefix_cache import GroupStats
from tests.support.pictures import picture
from tests.support.request_stream import (
    BLOCK_SIZE,
)
from tests.support.thinker_asks import (
    KINDS,
    TowerRuns,
    shows,
)
from tests.support.thinker_reference import Talk, clip, talkie, tone

ROW_BYTES = 64 * 4
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
    assert item_pages(shared_engine).held == 0


@pytest.fixture
def towers(monkeypatch: pytest.MonkeyPatch) -> TowerRuns:
    return TowerRuns(monkeypatch)


def item_pages(engine: LLMEngine) -> GroupStats:
    stats = engine.stats().kv
    assert stats is not None and stats.items is not None
    return stats.items


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
        torch.testing.assert_close(ours.tensors[name], rows, atol=1e-5, rtol=1e-5)


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


# Three chunks: rows of video and sound are 12 and 50, 12 and 50, 6 and 2.
LONG_TALKIE = talkie(2, tone(4.1), grids=5, seconds=1.0)


def test_a_video_in_step_with_its_sound_runs_each_tower_once(
    checkpoint: str, uncached: LLMEngine, towers: TowerRuns
) -> None:
    engine = build(checkpoint, max_num_batched_tokens=16)
    prompt = shows(engine, 5, ("video", LONG_TALKIE), 6)
    expected = run(uncached, prompt)
    towers.heard.clear()
    towers.seen.clear()
    assert_same(run(engine, prompt), expected)
    assert (towers.heard, towers.seen) == ([1], [1])
    again = run(engine, prompt)
    assert (towers.heard, towers.seen) == ([1], [1])
    assert again.num_cached_tokens == 132
    assert_same(again, expected)


def test_what_a_video_with_sound_shows_is_not_encoded_again_by_itself(
    engine: LLMEngine, towers: TowerRuns
) -> None:
    video, sound = clip(2, grids=3, seconds=1.0), tone(0.6)
    run(engine, shows(engine, 5, ("video", talkie(2, sound, grids=3, seconds=1.0)), 6))
    run(engine, shows(engine, ("audio", sound), 7, ("video", video), 6))
    assert (towers.heard, towers.seen) == ([1], [1])


def test_a_first_piece_spends_the_budget_of_the_whole(checkpoint: str, towers: TowerRuns) -> None:
    engine = build(checkpoint, max_num_encoder_tokens=50)
    videos = [talkie(seed, tone(0.25), grids=5, seconds=1.0) for seed in (2, 3)]  # 30 + 6 rows
    engine.generate([shows(engine, 5, ("video", video), 6) for video in videos], GREEDY)
    assert towers.seen == [1, 1]


@pytest.mark.parametrize("room", [62, 150])
def test_pieces_that_others_push_out_are_encoded_again(
    room: int, checkpoint: str, uncached: LLMEngine, towers: TowerRuns
) -> None:
    """The video has 30 rows, its sound 57."""
    video = talkie(2, tone(2.3), grids=5, seconds=1.0)
    prompts = [shows(uncached, n, ("video", video), 6) for n in (20, 21)]
    prompts += [shows(uncached, 22, ("image", picture(0)), ("audio", tone(0.4)), 7)]
    expected = [run(uncached, prompt) for prompt in prompts]
    towers.heard.clear()
    engine = build(
        checkpoint,
        max_num_batched_tokens=16,
        max_num_encoder_tokens=8,
        encoder_cache_bytes=room * ROW_BYTES,
    )
    outputs = engine.generate(prompts, GREEDY)
    for output, answer in zip(outputs, expected, strict=True):
        assert_same(output, answer)
    # With room for one of the two at a time, each is encoded as often as it comes.
    assert len(towers.heard) > 2 if room == 62 else len(towers.heard) == 2
    engine.check_integrity()
    assert item_pages(engine).held == 0


def test_the_same_video_with_other_sound_hits_what_is_before_it_alone(
    engine: LLMEngine, uncached: LLMEngine
) -> None:
    before = (10, 11, 12, 13, 14)
    one, other = (
        shows(engine, *before, ("video", talkie(2, tone(0.25, hertz), 4, 1.0)), 6, 7)
        for hertz in (300.0, 2000.0)
    )
    assert one.prompt_token_ids == other.prompt_token_ids
    expected = run(uncached, other)
    run(engine, one)
    output = run(engine, other)
    assert output.num_cached_tokens == 4
    assert_same(output, expected)


def test_the_same_tokens_and_items_one_after_the_other_never_hit(
    engine: LLMEngine, uncached: LLMEngine
) -> None:
    """In step, the sound begins where its video does, and the mark before them one place back."""
    assert engine.tokenizer is not None
    vocabulary = engine.tokenizer.get_vocab()
    names = ("<|vision_bos|>", "<|audio_bos|>", "<|audio_eos|>", "<|vision_eos|>")
    outer, inner, end, last = (vocabulary[name] for name in names)
    video, sound = clip(1, grids=2), tone(0.25)
    in_step = shows(engine, 20, 21, outer, ("video", talkie(1, sound, grids=2)), last, 22)
    one_by_one = shows(
        engine, 20, 21, outer, inner, ("video", video), ("audio", sound), end, last, 22
    )
    expected = run(uncached, one_by_one)
    first = run(engine, in_step)
    output = run(engine, one_by_one)
    assert output.prompt_token_ids == first.prompt_token_ids
    assert output.num_cached_tokens == 0
    assert_same(output, expected)


def test_a_reply_after_a_video_with_sound_is_found_as_prompt(
    engine: LLMEngine, uncached: LLMEngine
) -> None:
    """What was generated lies where the next turn has it, though the video reaches further."""
    far = ("video", talkie(3, tone(0.3), grids=3, seconds=0.9))
    first = shows(engine, far, 6)
    said = run(engine, first)
    reply = said.outputs[0].token_ids
    second = shows(engine, far, 6, *reply, 7)
    expected = run(uncached, second)
    output = run(engine, second)
    assert output.num_cached_tokens is not None
    assert output.num_cached_tokens > len(said.prompt_token_ids)
    assert_same(output, expected)
