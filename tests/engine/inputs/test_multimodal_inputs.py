"""Images, sound and video in prompts: features, placeholders, and errors of single requests."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2_5OmniProcessor, WhisperFeatureExtractor

from engine import AudioPrompt, EngineConfig, LLMEngine, RequestOutput, SamplingParams, TokensPrompt
from engine.inputs.multimodal_inputs import AudioFeatureMaker, AudioInVideo
from engine.requests.encoder_input import Modality, MultiModalInput
from tests.support.encoder_decoder_requests import write_wav
from tests.support.pictures import picture
from tests.support.thinker_asks import TowerRuns, shows
from tests.support.thinker_reference import Talk, ThinkerReference, clip, tone

RATE = 16_000
ROW_BYTES = 64 * 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def build(checkpoint: str, **changed: Any) -> LLMEngine:
    usual = {"block_size": 4, "num_blocks": 96, "max_num_seqs": 4, "max_model_len": 200}
    return LLMEngine(EngineConfig(model=checkpoint, part="thinker", **(usual | changed)))


@pytest.fixture(scope="module")
def checkpoint(seeded: Callable[[str], str]) -> str:
    return seeded("qwen2_5_omni")


@pytest.fixture(scope="module")
def shared_engine(checkpoint: str) -> LLMEngine:
    return build(checkpoint)


@pytest.fixture
def engine(shared_engine: LLMEngine) -> Iterator[LLMEngine]:
    shared_engine.reset_prefix_cache()
    yield shared_engine
    shared_engine.check_integrity()
    assert not shared_engine.has_unfinished_requests


def refuse(engine: LLMEngine, prompt: TokensPrompt, message: str) -> None:
    """Check that the request is refused without effect on a good one that runs."""
    good = shows(engine, 5, ("image", picture(0)), ("audio", tone(0.25)), 6)
    (expected,) = engine.generate(good, GREEDY)
    engine.reset_prefix_cache()
    before = engine.stats().encoder_runs
    engine.add_request("good", good, GREEDY)
    with pytest.raises(ValueError, match=message):
        engine.add_request("bad", prompt, GREEDY)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests:
        outputs = list(engine.step())
    assert [(output.request_id, output.error) for output in outputs] == [("good", None)]
    assert outputs[0].outputs[0].token_ids == expected.outputs[0].token_ids
    stats = engine.stats()
    assert stats.kv is not None and stats.kv.items is not None
    assert (stats.encoder_runs - before, stats.kv.items.held) == (2, 0)
    assert stats.kv.items.cached >= 2


@pytest.mark.parametrize(
    ("kind", "item"), [("image", picture(0)), ("audio", tone(0.25)), ("video", clip(0))]
)
def test_unequal_numbers_of_placeholders_and_items_are_refused(
    engine: LLMEngine, kind: Modality, item: Any
) -> None:
    without_item = replace(shows(engine, 5, (kind, None)), multi_modal_data={})
    message = f"1 {kind} placeholders .* but 0 {kind} items were given; give one {kind} for each"
    refuse(engine, without_item, message)
    message = f"0 {kind} placeholders .* but 1 {kind} items were given; write a placeholder where"
    refuse(engine, TokensPrompt((5, 6), {kind: [item]}), message)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "multi_modal_data must be a mapping .* got NoneType"),
        ([tone(0.25)], "multi_modal_data must be a mapping .* got list"),
        ({"smell": []}, "has 'smell'; what can be shown is 'image', 'audio', 'video'"),
        ({"audio": tone(0.25)}, r"multi_modal_data\['audio'\] must be a list .* got ndarray"),
        ({"audio": torch.zeros(9)}, r"multi_modal_data\['audio'\] must be a list .* got Tensor"),
        ({"video": clip(0)}, r"multi_modal_data\['video'\] must be a list .* got VideoFeatures"),
    ],
)
def test_data_without_lists_of_items_is_refused(engine: LLMEngine, data: Any, message: str) -> None:
    refuse(engine, TokensPrompt((5, 6), data), message)


META, SPARSE = "meta", torch.ones(8000).to_sparse()
WRONG_SOUNDS: dict[str, tuple[Any, str]] = {
    "nothing to hear": (np.zeros(0, np.float32), "audio 0: the audio is empty"),
    "two frames": (tone(0.02), "audio 0: the audio is too short: it has 2 frames"),
    "too long": (tone(31.0), r"audio 0: .* is 31\.00 s long, but the model takes 30 s"),
    "stereo": (np.zeros((2, 99), np.float32), "audio 0: .* must be mono"),
    "integers": (np.zeros(99, np.int16), "audio 0: .* floating-point .* got int16"),
    "unscaled integers": (tone(0.5) * 32_768, "samples of up to .*divide 16-bit"),
    "no number": (np.full(9999, np.nan, np.float32), "audio 0: .* NaN or infinite"),
    "no rate": (AudioPrompt(tone(0.25), 0), "audio 0: the audio has a sampling rate of 0"),
    "no file of sound": ("no.wav", "audio 0: audio 'no.wav' cannot be read"),
    "no samples": (torch.empty(8000, device=META), "audio must be a tensor with values"),
    "sparse samples": (SPARSE, "audio must be a dense tensor, got"),
    "a rate in words": (
        AudioPrompt(tone(0.25), "fast"),  # type: ignore[arg-type]
        r"sampling_rate must be a number or None, got 'fast' \(str\)",
    ),
}
COLOURS = (56, 56, 3)
WRONG_IMAGES: dict[str, tuple[Any, str]] = {
    "a strip": (picture(0, (1, 4000)), "image 0: it has 1 x 4000 pixels, and one side"),
    "a number": (3, "image 0: image must be a file, .* or an array of pixels, got int"),
    "no colours": (
        torch.empty(COLOURS, dtype=torch.uint8, device=META),
        "image 0: pixels must be a tensor with values, got one on the device meta",
    ),
    "half colours": (
        torch.ones(COLOURS, dtype=torch.bfloat16),
        r"an array of pixels must be .* got \(56, 56, 3\) of bfloat16",
    ),
}
# Fields of a clip to change.
PATCHES, GRID, SOUND = "pixel_values_videos", "video_grid_thw", "audio"
WRONG_CLIPS: dict[str, tuple[str, Any, str]] = {
    "bytes": (PATCHES, torch.zeros(48, 1176).byte(), "be a floating-point tensor, got torch.uint8"),
    "no pixel": (PATCHES, torch.full((48, 1176), torch.inf), "videos holds NaN or infinite"),
    "no patches": (PATCHES, torch.empty(48, 1176, device=META), "videos must be a tensor with"),
    "sparse patches": (PATCHES, torch.ones(48, 1176).to_sparse(), "must be a dense tensor"),
    "too few patches": (GRID, (3, 4, 6), r"of 3 x 4 x 6 patches must be \(72, 1176\), got \(48,"),
    "half a square": (GRID, (4, 3, 4), "two multiples of 2, got"),
    "no grid": (GRID, (0, 4, 6), "must be at least 1 and two multiples"),
    "half a grid": (GRID, (4, 6), "must have three numbers"),
    "a grid of fractions": (GRID, torch.ones(3), "must be integers, got torch.float32"),
    "a grid in words": (GRID, "abc", "video_grid_thw must be integers:"),
    "no grid at all": (GRID, None, "video_grid_thw must be integers:"),
    "a huge grid": (GRID, (10**30, 4, 6), "grid_thw must be integers:"),
    "a complex grid": (GRID, torch.ones(3) * 1j, "must be integers, got torch.complex64"),
    "a grid without values": (GRID, torch.ones(3, device=META).long(), "be a tensor with values"),
    "no time": ("second_per_grid", 0.0, "second_per_grid must be more than 0"),
    "a slow video": ("second_per_grid", 9.0, "reaches place 227 .* is 200"),
    "time in words": ("second_per_grid", "x", "second_per_grid must be a number:"),
    "no time at all": ("second_per_grid", None, "second_per_grid must be a number:"),
    "an age": ("second_per_grid", 1e30, "1e.30 s, which cannot be placed"),
    "a strange sound": (SOUND, 3, "video 0: its audio: audio must be a file of sound"),
    "too short to hear": (SOUND, tone(0.02), "its audio: the audio is too short: it has 2 frames"),
    "a missing soundtrack": (SOUND, "no.wav", "video 0: its audio: .* cannot be"),
}
WRONG: dict[str, tuple[Modality, Any, str]] = {
    **{name: ("audio", *each) for name, each in WRONG_SOUNDS.items()},
    **{name: ("image", *each) for name, each in WRONG_IMAGES.items()},
    **{
        name: ("video", replace(clip(0), **{changed: value}), message)
        for name, (changed, value, message) in WRONG_CLIPS.items()
    },
    "a file of video": ("video", "a.mp4", "video 0: video 'a.mp4' cannot be read: No such"),
    "a late grid": (
        "video",
        replace(clip(0), second_per_grid=9.0, audio=tone(0.25)),
        "reaches place 227 .* is 200",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_item_is_refused(engine: LLMEngine, name: str) -> None:
    kind, item, message = WRONG[name]
    refuse(engine, shows(engine, 5, (kind, item), 6), message)


@pytest.mark.parametrize(("kind", "suffix"), [("image", "png"), ("audio", "wav")])
def test_a_broken_file_is_refused(
    engine: LLMEngine, kind: Modality, suffix: str, tmp_path: Path
) -> None:
    file = tmp_path / f"broken.{suffix}"
    if kind == "image":
        picture(0).save(file)
    else:
        write_wav(file, tone(0.25))
    file.write_bytes(file.read_bytes()[:30])  # cut off after the header
    whole: dict[Modality, Any] = {"image": picture(0), "audio": tone(0.25)}
    # The second of two: the first, already read, is freed too.
    prompt = shows(engine, 5, (kind, whole[kind]), 6, (kind, file))
    refuse(engine, prompt, rf"{kind} 1: .*broken\.{suffix}' (cannot be read|is no WAV)")


def test_a_pixel_is_seen_and_silence_is_heard(engine: LLMEngine, checkpoint: str) -> None:
    reference, silence = ThinkerReference(checkpoint), np.zeros(RATE // 2, np.float32)
    greedy = GREEDY.model_copy(update={"suppress_token_ids": reference.suppressed})
    for item in (picture(0, (1, 1)), silence):
        talk = Talk([item, "What is it?"])
        (output,) = engine.generate(talk.prompt, greedy)
        assert list(output.outputs[0].token_ids) == reference.answer(talk, 6).token_ids


def test_samples_files_and_tensors_are_the_same(engine: LLMEngine, tmp_path: Path) -> None:
    file = write_wav(tmp_path / "a.wav", tone(0.25))
    samples = np.round(tone(0.25) * 32767).astype(np.float32) / 32768
    engine.generate(shows(engine, ("audio", samples), 25, 26, 27), GREEDY)
    forms = (file, str(file), torch.from_numpy(samples), samples.astype(np.float64))
    for item in (*forms, AudioPrompt(file)):
        (output,) = engine.generate(shows(engine, ("audio", item), 25, 26, 27), GREEDY)
        assert output.num_cached_tokens == 8


def test_an_item_too_large_for_the_encoder_cache_is_refused(checkpoint: str) -> None:
    engine = build(checkpoint, encoder_cache_bytes=6 * ROW_BYTES)
    with pytest.raises(ValueError, match="audio 0: 7 rows take .* room for 6 rows; raise encoder"):
        engine.generate(shows(engine, 5, ("audio", tone(0.3)), 6), GREEDY)
    talking = replace(clip(0, grids=1), audio=tone(0.3))
    with pytest.raises(ValueError, match="video 0: its audio: 7 rows take .* room for 6 rows"):
        engine.generate(shows(engine, 5, ("video", talking), 6), GREEDY)
    (output,) = engine.generate(shows(engine, 5, ("audio", tone(0.25)), 6), GREEDY)
    assert output.error is None


def test_items_beyond_the_encoder_budgets_take_turns(
    checkpoint: str, shared_engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents: list[list[Any]] = [
        [5, ("audio", tone(0.25)), ("image", picture(n)), ("video", clip(n, grids=1)), 7, n + 20]
        for n in range(3)
    ]
    shared_engine.reset_prefix_cache()
    prompts = [shows(shared_engine, *content) for content in contents]
    expected = [output.outputs[0].token_ids for output in shared_engine.generate(prompts, GREEDY)]
    towers = TowerRuns(monkeypatch)
    engine = build(checkpoint, encoder_cache_bytes=6 * ROW_BYTES, max_num_encoder_tokens=2)
    outputs = engine.generate(prompts, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert set(towers.heard) == set(towers.seen) == {1}
    engine.check_integrity()


def test_a_checkpoint_without_processors_still_runs_text(checkpoint: str, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(checkpoint, folder)
    (folder / "preprocessor_config.json").unlink()
    engine = build(str(folder))
    for kind, item, name in (
        ("image", picture(0), "image processor"),
        ("audio", tone(0.25), "feature extractor"),
    ):
        with pytest.raises(ValueError, match=f"{kind} 0: the {name} in .* cannot be loaded"):
            engine.generate(shows(engine, 5, (kind, item)), GREEDY)  # type: ignore[arg-type]
    prompts = [TokensPrompt((5, 6, 7)), shows(engine, 5, ("video", clip(0)), 6)]
    assert [output.error for output in engine.generate(prompts, GREEDY)] == [None] * 2


def test_unsupported_modalities_are_refused(seeded: Callable[[str], str]) -> None:
    sound = TokensPrompt((5, 6), {"audio": [tone(0.25)]})
    deaf = LLMEngine(EngineConfig(model=seeded("qwen2_5_vl"), num_blocks=16, max_model_len=32))
    with pytest.raises(ValueError, match="has 'audio'; what can be shown is 'image', 'video'$"):
        deaf.generate(sound, GREEDY)
    assert deaf.tokenizer is not None
    place = deaf.tokenizer.get_vocab()["<|video_pad|>"]
    talking = {"video": [replace(clip(0), audio=tone(0.25))]}
    with pytest.raises(ValueError, match="video 0: this model takes no video with its own sound"):
        deaf.generate(TokensPrompt((5, place, 6), talking), GREEDY)
    images = LLMEngine(EngineConfig(model=seeded("llava"), num_blocks=16, max_model_len=32))
    with pytest.raises(ValueError, match="has 'video'; what can be shown is 'image'$"):
        images.generate(TokensPrompt((5, 6), talking), GREEDY)


@given(
    gaps=st.lists(st.integers(0, 130), max_size=20),
    num_sound=st.integers(1, 120),
    places_per_chunk=st.integers(1, 60),
    offset=st.integers(0, 9),
)
def test_pieces_are_the_chunks_of_transformers_in_turns_between_their_marks(
    gaps: list[int], num_sound: int, places_per_chunk: int, offset: int
) -> None:
    times = [0, *np.cumsum(gaps, dtype=int).tolist()]
    video = MultiModalInput("video", offset, len(times), b"v", {})
    sound = MultiModalInput("audio", offset, num_sound, b"s", {})
    pieces = AudioInVideo(1, 2, places_per_chunk).interleave(
        video, sound, (torch.tensor(times), torch.arange(num_sound))
    )
    for modality, rows in (("video", times), ("audio", list(range(num_sound)))):
        ours = [
            (piece.rows_before, piece.rows_before + piece.length)
            for piece in pieces
            if piece.modality == modality
        ]
        assert ours == Qwen2_5OmniProcessor.get_chunked_index(
            None, np.array(rows), places_per_chunk
        )
        assert {piece.num_rows for piece in pieces if piece.modality == modality} == {len(rows)}
    turns = "".join(piece.modality[0] for piece in pieces)
    seen, heard = turns.count("v"), turns.count("a")
    both = min(seen, heard)
    assert turns == "va" * both + "v" * (seen - both) + "a" * (heard - both)
    assert [piece.offset for piece in pieces] == [offset + 1, *(piece.end for piece in pieces[:-1])]
    (whole,) = {piece.span for piece in pieces}
    assert (whole.offset, whole.end) == (offset, pieces[-1].end + 1)
    assert whole.length == len(times) + num_sound + 2


def test_the_hash_of_a_span_depends_on_both_halves() -> None:
    def span(video: bytes, sound: bytes) -> bytes:
        rows = torch.zeros(1)
        items = [MultiModalInput("video", 0, 1, content, {}) for content in (video, sound)]
        return (
            AudioInVideo(1, 2, 50).interleave(items[0], items[1], (rows, rows))[0].span.content_hash
        )

    one, two = bytes(32), bytes([1] * 32)
    assert len({span(one, one), span(one, two), span(two, one), span(two, two)}) == 4


def test_a_chunk_without_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="must have a place, got 0"):
        AudioInVideo(1, 2, 0)


# The published window is five minutes long; only its length differs here.
EXTRACTOR = WhisperFeatureExtractor(feature_size=32, chunk_length=3)
WINDOW = 48_000


@pytest.mark.parametrize("num_samples", [1, 161, 1600, 15_999, 16_001, WINDOW - 300, WINDOW])
def test_features_are_those_of_a_padded_window(num_samples: int) -> None:
    noise = np.random.default_rng(num_samples).standard_normal(num_samples)
    samples = (0.1 * noise).astype(np.float32)
    padded = EXTRACTOR(
        samples,
        sampling_rate=16_000,
        padding="max_length",
        return_attention_mask=True,
        return_tensors="pt",
    )
    expected = padded["input_features"][0][:, padded["attention_mask"][0].bool()]
    found = AudioFeatureMaker(EXTRACTOR).make(samples)["input_features"]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_a_short_sound_does_not_fill_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    plain = WhisperFeatureExtractor._torch_extract_fbank_features

    def counting(self: WhisperFeatureExtractor, waveform: np.ndarray, device: str = "cpu"):
        lengths.append(waveform.shape[-1])
        return plain(self, waveform, device)

    monkeypatch.setattr(WhisperFeatureExtractor, "_torch_extract_fbank_features", counting)
    AudioFeatureMaker(EXTRACTOR).make(np.zeros(1_600, np.float32))
    assert lengths == [2_080]


def test_a_sound_too_short_to_be_mirrored_is_refused() -> None:
    maker = AudioFeatureMaker(EXTRACTOR, sound_end="mirrored")
    assert maker.make(np.zeros(201, np.float32))["input_features"].shape[1]
    with pytest.raises(ValueError, match="too short: of 200 samples 200 cannot be mirrored"):
        maker.make(np.zeros(200, np.float32))


def test_a_language_is_a_hint_that_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    maker, samples = AudioFeatureMaker(EXTRACTOR), np.sin(np.arange(3_200)).astype(np.float32)
    plain = maker.make(samples)["input_features"]
    with caplog.at_level("INFO", logger="omni"):
        for _ in range(2):
            prompt = AudioPrompt(samples, language="en", task="transcribe")
            assert torch.equal(maker.make(prompt)["input_features"], plain)
    assert [each.message[:33] for each in caplog.records] == ["a request names the language 'en'"]
    with pytest.raises(ValueError, match="task is for speech models"):
        maker.make(AudioPrompt(samples, language="en", task="translate"))
