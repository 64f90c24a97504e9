"""Images, sound and videos in prompts: which items are encoded, and which blocks hit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoTokenizer, LlavaProcessor

from engine import (
    ChatPrompt,
    EncoderEngine,
    EngineConfig,
    ExplicitEncoderDecoderPrompt,
    LLMEngine,
    RequestOutput,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from engine.models.multimodal import MultiModalModel
from engine.requests.encoder_input import Modality, MultiModalInput
from prefix_cache import GroupStats
from tests.support.pictures import PLACEHOLDER, picture
from tests.support.request_stream import BLOCK_SIZE
from tests.support.thinker_asks import KINDS, TowerRuns, shows
from tests.support.thinker_reference import Talk, clip, talkie, tone

ROW_BYTES = 64 * 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
# Six rows each; the two of a kind have equal shapes.
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
    """The block that the item fills hits; its remaining rows come from the encoder cache::

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


def test_the_same_frames_at_another_pace_never_hit(engine: LLMEngine) -> None:
    """Their rows are equal, but their positions are not."""
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
def test_evicted_pieces_are_encoded_again(
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
    # With room for only one of the two, each is encoded again for every request.
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
    """Interleaved, the sound begins where its video does, and the mark before them one earlier."""
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
    """Generated tokens have the positions of the next turn, though the video extends further."""
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


NOTHING = SamplingParams(temperature=0.0, max_tokens=0)


class Eyes:
    """Counts images per run of the tower."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.encoded: list[int] = []  # images of each run of the tower
        encode = MultiModalModel.encode_multimodal

        def counting(model: MultiModalModel, inputs: Sequence[MultiModalInput]) -> list[Tensor]:
            self.encoded.append(len(inputs))
            return encode(model, inputs)

        monkeypatch.setattr(MultiModalModel, "encode_multimodal", counting)


@pytest.fixture
def eyes(monkeypatch: pytest.MonkeyPatch) -> Eyes:
    return Eyes(monkeypatch)


@pytest.fixture(scope="module")
def vl_checkpoint(seeded: Callable[[str], str]) -> str:
    return seeded("qwen2_5_vl")


def build_vl(checkpoint: str, **settings: Any) -> LLMEngine:
    usual = {"block_size": BLOCK_SIZE, "num_blocks": 64, "max_num_seqs": 4, "max_model_len": 200}
    return LLMEngine(EngineConfig(model=checkpoint, **(usual | settings)))


@pytest.fixture
def vl_engine(shared_vl_engine: LLMEngine) -> Iterator[LLMEngine]:
    shared_vl_engine.reset_prefix_cache()
    yield shared_vl_engine
    shared_vl_engine.check_integrity()
    assert item_pages(shared_vl_engine).held == 0


@pytest.fixture(scope="module")
def shared_vl_engine(vl_checkpoint: str) -> LLMEngine:
    return build_vl(vl_checkpoint)


def placeholder(engine: LLMEngine) -> int:
    assert engine.tokenizer is not None
    return int(engine.tokenizer.convert_tokens_to_ids(PLACEHOLDER["qwen2_5_vl"]))


def shows_pictures(engine: LLMEngine, *content: int | Image.Image) -> TokensPrompt:
    """Return a prompt of token ids and pictures in this order."""
    pictures = [part for part in content if not isinstance(part, int)]
    ids = tuple(part if isinstance(part, int) else placeholder(engine) for part in content)
    return TokensPrompt(ids, {"image": pictures})


def hidden_states(engine: LLMEngine, prompt: TokensPrompt) -> Tensor:
    return engine.generate(prompt, NOTHING)[0].outputs[0].tensors["hidden_states"]


def test_an_image_whose_blocks_all_hit_is_not_encoded(vl_engine: LLMEngine, eyes: Eyes) -> None:
    prompt = shows_pictures(vl_engine, picture(0), 7, 8, 9, 10)
    vl_engine.generate(prompt, NOTHING)
    for _ in range(item_pages(vl_engine).cached):
        vl_engine._kv.pool.evict(vl_engine._kv.config.item_group_id)
    assert vl_engine.generate(prompt, NOTHING)[0].num_cached_tokens == 8
    assert eyes.encoded == [1]
    # A hit that ends inside the image needs its remaining rows.
    assert (
        vl_engine.generate(shows_pictures(vl_engine, picture(0), 11), NOTHING)[0].num_cached_tokens
        == 4
    )
    assert eyes.encoded == [1, 1]


def test_a_chunk_may_end_inside_an_image(vl_checkpoint: str, eyes: Eyes) -> None:
    engine = build_vl(vl_checkpoint, max_num_batched_tokens=4, max_num_seqs=1)
    prompt = shows_pictures(engine, 5, 6, picture(0), 7, 8, picture(1), 9)
    expected = hidden_states(build_vl(vl_checkpoint), prompt)
    eyes.encoded.clear()
    engine.add_request("one", prompt, NOTHING)
    held = []
    while engine.has_unfinished_requests:
        outputs = engine.step()
        held.append(item_pages(engine).held)
    # 0 1 [2 3 | 4 5 6 7] | 8 9 [10 11 | 12 13 14 15] | 16
    assert held == [2, 0, 2, 0, 0]  # pages of four rows
    assert eyes.encoded == [1, 1]
    rows = outputs[0].outputs[0].tensors["hidden_states"]
    torch.testing.assert_close(rows, expected, atol=1e-5, rtol=0)


def test_placeholders_are_expanded_as_transformers_does(seeded: Callable[[str], str]) -> None:
    folder = seeded("llava")
    processor = LlavaProcessor(
        AutoImageProcessor.from_pretrained(folder, backend="pil"),
        AutoTokenizer.from_pretrained(folder),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    text = "Look: <image> and <image>."
    images = [picture(0), picture(3)]
    theirs = processor(text=text, images=images, return_tensors="pt")
    engine = build_vl(folder)
    (output,) = engine.generate(TextPrompt(text, multi_modal_data={"image": images}), NOTHING)
    assert list(output.prompt_token_ids) == theirs["input_ids"][0].tolist()
    parts = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    chat = ChatPrompt(({"role": "user", "content": parts},), {"image": images[:1]})
    (output,) = engine.generate(chat, NOTHING)
    image_id = engine.tokenizer.convert_tokens_to_ids("<image>")  # type: ignore[union-attr]
    assert list(output.prompt_token_ids).count(image_id) == 16


def test_files_and_pillow_images_are_the_same(vl_engine: LLMEngine, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    picture(0).save(file)
    vl_engine.generate(shows_pictures(vl_engine, picture(0), 7, 8, 9), NOTHING)
    ids = shows_pictures(vl_engine, picture(0), 7, 8, 9).prompt_token_ids
    pixels = np.asarray(picture(0))
    for form in (file, str(file), pixels, torch.from_numpy(pixels.copy())):
        (output,) = vl_engine.generate(TokensPrompt(ids, {"image": [form]}), NOTHING)
        assert output.num_cached_tokens == 8


def test_models_without_image_inputs_refuse_images(
    qwen2_checkpoint: str, bert_checkpoint: str, seeded: Callable[[str], str]
) -> None:
    message = "shows 1 image items in multi_modal_data, but this model takes none there"
    prompt = TokensPrompt((5, 6), {"image": [picture(0)]})
    with pytest.raises(ValueError, match=message):
        build_vl(qwen2_checkpoint).generate(prompt, GREEDY)
    with pytest.raises(ValueError, match=message):
        EncoderEngine(EngineConfig(model=bert_checkpoint)).add_request("one", prompt)
    encoder_decoder = build_vl(seeded("t5"))
    for form in (prompt, ExplicitEncoderDecoderPrompt("text", prompt)):
        with pytest.raises(ValueError, match=message):
            encoder_decoder.generate(form, GREEDY)
