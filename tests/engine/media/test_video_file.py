"""Frames and sound of mp4 and webm files, their limits, and models that read them."""

from __future__ import annotations

import json
import math
import os
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as frame_size
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from engine import (
    AudioPrompt,
    EngineConfig,
    LLMEngine,
    SamplingParams,
    TokensPrompt,
    VideoFeatures,
    VideoPrompt,
)
from engine.inputs.multimodal_inputs import VideoFeatureMaker, VideoSampling
from engine.interface.config import MediaLimits
from engine.media.media_source import MediaSource
from engine.media.video_file import (
    VideoInfo,
    check_video_length,
    probe_video,
    read_frames,
    read_soundtrack,
    upright,
)
from engine.models.qwen3_vl.qwen3_vl import SpreadSampling
from tests.support.thinker_asks import shows
from tests.support.videos import FORMATS, moving_picture, video_file

LIMITS = MediaLimits()
FRAMES = moving_picture(12)
RATE = 48_000


def soundtrack(video: MediaSource, limits: MediaLimits = LIMITS) -> Any:
    return read_soundtrack(video, partial(check_video_length, source=video, limits=limits))


def source(given: str | Path | bytes) -> MediaSource:
    return MediaSource(given, "video", 2**20)


def tone(seconds: float, rate: int = RATE) -> np.ndarray:
    return (0.4 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)).astype("f4")


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return {kind: video_file(kind, FRAMES, 8, tone(1.5)) for kind in FORMATS}


def chosen(content: bytes, indices: list[int], limits: MediaLimits = LIMITS) -> list[np.ndarray]:
    video = source(content)
    return list(read_frames(video, probe_video(video, limits), indices, limits))


@pytest.mark.parametrize("kind", FORMATS)
def test_frames_are_read_as_written(kind: str, files: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "no ending"
    path.write_bytes(files[kind])
    for form in (path, str(path), files[kind]):
        assert probe_video(source(form), LIMITS) == VideoInfo(12, 8.0, 64, 48, True)
    whole = chosen(files[kind], list(range(12)))
    for found, expected in zip(whole, FRAMES, strict=True):
        assert found.shape == (48, 64, 3) and found.dtype == np.uint8
        assert np.abs(found.astype(int) - expected).mean() < 9  # a lossy codec
    for found, index in zip(chosen(files[kind], [0, 5, 11]), (0, 5, 11), strict=True):
        np.testing.assert_array_equal(found, whole[index])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("begins", [0.0, 0.25])
def test_sound_is_synchronous_with_the_frames(kind: str, begins: float) -> None:
    content = video_file(kind, FRAMES, 8, tone(1.0), sound_begins=begins)
    sound = soundtrack(source(content))
    assert sound is not None
    samples, rate = sound
    assert rate == RATE and samples.dtype == np.float32
    start = round(begins * RATE)
    assert np.abs(samples[: max(0, start - 1_200)]).max(initial=0) < 0.05
    heard, expected = samples[start + 2_400 : start + 43_200], tone(1.0)[2_400:43_200]
    # The codec is lossy; the shift is at most one millisecond.
    best = max(np.corrcoef(np.roll(heard, lag), expected)[0, 1] for lag in range(-48, 49))
    assert best > 0.99


def test_a_video_without_sound_is_read() -> None:
    content = video_file("mp4", FRAMES)
    assert not probe_video(source(content), LIMITS).has_sound
    assert soundtrack(source(content)) is None


def test_a_frame_is_rotated_by_right_angles() -> None:
    pixels = FRAMES[0]
    np.testing.assert_array_equal(upright(pixels, 0), pixels)
    np.testing.assert_array_equal(upright(pixels, 90), pixels.transpose(1, 0, 2)[::-1])
    np.testing.assert_array_equal(upright(pixels, -90), pixels[::-1].transpose(1, 0, 2))
    np.testing.assert_array_equal(upright(pixels, 180), pixels[::-1, ::-1])


@pytest.mark.parametrize("kind", FORMATS)
def test_limits_are_checked_before_decoding(
    kind: str, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    import av

    def decode(*_: object) -> None:
        raise AssertionError("decoded")

    small = {
        "max_video_s": (1.4, "is longer than 1.4 s, .* raise engine.media_limits.max_video_s"),
        "max_image_pixels": (3_071, "frames of 64 x 48 pixels, .* 1 to 3071"),
        "max_video_pixels": (9_215, "3 frames of 64 x 48 pixels are looked at, 9216 together"),
    }
    content = files[kind]
    monkeypatch.setattr(av.container.InputContainer, "decode", decode, raising=False)
    for name, (value, message) in small.items():
        with pytest.raises(ValueError, match=message):
            chosen(content, [0, 1, 2], MediaLimits(**{name: value}))


def test_sound_longer_than_the_limit_is_refused() -> None:
    content = video_file("mp4", FRAMES[:2], 8, tone(3.0))
    probe_video(source(content), MediaLimits(max_video_s=1.0))
    with pytest.raises(ValueError, match="is longer than 1 s"):
        soundtrack(source(content), MediaLimits(max_video_s=1.0))


WRONG = {
    b"": "cannot be read: it is neither mp4 nor webm",
    b"#EXTM3U\nhttp://example.org/a.ts\n": "cannot be read: it is neither mp4 nor webm",
    b"RIFF\x04\0\0\0AVI " + bytes(60): "cannot be read: it is neither mp4 nor webm",
    b"\0\0\0\x20ftypisom" + bytes(60): "the video (cannot be read as a video|holds no moving)",
    b"\x1aE\xdf\xa3" + bytes(60): "the video (cannot be read as a video|holds no moving)",
}


@pytest.mark.parametrize("content", WRONG)
def test_invalid_videos_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=WRONG[content]):
        probe_video(source(content), LIMITS)


def test_sound_alone_is_no_video(files: dict[str, bytes], tmp_path: Path) -> None:
    import av

    path = tmp_path / "a.mp4"
    with av.open(str(path), "w", format="mp4") as container:
        track = container.add_stream("aac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(tone(0.064, 16_000)[None], "fltp", "mono")
        frame.sample_rate = 16_000
        container.mux(track.encode(frame))
        container.mux(track.encode())
    with pytest.raises(ValueError, match=r"a\.mp4' holds no moving picture"):
        probe_video(source(path), LIMITS)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="cannot be read: it is a named pipe"):
        probe_video(source(tmp_path / "pipe"), LIMITS)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_truncated_file_is_refused(kind: str, files: dict[str, bytes]) -> None:
    """A webm file does not state its length, so it is read up to the cut."""
    content = files[kind][: len(files[kind]) // 2]
    if kind == "webm":
        assert probe_video(source(content), LIMITS).num_frames < 12
        return
    with pytest.raises(ValueError, match=r"the video (cannot be read|is cut off|is damaged)"):
        chosen(content, list(range(12)))


GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
FPS = 8


@pytest.fixture(scope="module")
def folder(seeded: Callable[[str], str]) -> str:
    return seeded("qwen2_5_omni")


@pytest.fixture(scope="module")
def engine(folder: str) -> LLMEngine:
    return build(folder, "thinker")


def build(folder: str, part: str | None) -> LLMEngine:
    config = EngineConfig(
        model=folder, part=part, num_blocks=256, block_size=8, max_model_len=512, dtype="float32"
    )
    return LLMEngine(config)


@pytest.fixture(scope="module")
def talkie() -> bytes:
    return video_file("mp4", moving_picture(28, (84, 60)), FPS, tone(3.5))


def as_tensors(
    folder: str, content: bytes, indices: list[int], *, hears: bool, **given: Any
) -> VideoFeatures:
    """Features made by the image processor alone, which gets each frame as an image."""
    video = source(content)
    info = probe_video(video, LIMITS)
    frames = list(read_frames(video, info, indices, LIMITS))
    processor: Any = AutoImageProcessor.from_pretrained(folder, backend="pil")
    made = processor(images=frames, return_tensors="pt", **given)
    height, width = made["image_grid_thw"][0, 1:].tolist()
    patches = made["pixel_values"].reshape(len(frames), height * width, 3, 2, 14 * 14)
    pairs = torch.stack([patches[0::2, :, :, 0], patches[1::2, :, :, 1]], dim=3)
    sound = soundtrack(video) if hears else None
    seconds = 2 / (len(indices) / info.num_frames * info.fps)
    return VideoFeatures(
        pairs.reshape(-1, 3 * 2 * 14 * 14),
        (len(frames) // 2, height, width),
        seconds,
        None if sound is None else AudioPrompt(*sound),
    )


def rows(
    engine: LLMEngine, item: Any, placeholder: str = "<|VIDEO|>"
) -> tuple[torch.Tensor, list[int], int]:
    """Hidden states, generated ids and the length of a prompt that shows the item."""
    engine.reset_prefix_cache()
    assert engine.tokenizer is not None
    shown = engine.tokenizer.get_vocab()[placeholder]
    prompt = TokensPrompt((5, shown, 6, 7), {"video": [item]})
    (output,) = engine.generate(prompt, GREEDY)
    assert output.error is None
    return (
        output.outputs[0].tensors["hidden_states"],
        list(output.outputs[0].token_ids),
        output.num_prompt_tokens,
    )


def assert_same(found: tuple[torch.Tensor, list[int], int], expected: Any) -> None:
    assert found[1:] == expected[1:]
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("hears", [True, False])
@pytest.mark.parametrize("kind", ["mp4", "webm"])
def test_a_file_equals_its_frames_given_as_tensors(
    engine: LLMEngine, folder: str, kind: str, hears: bool, tmp_path: Path
) -> None:
    content = video_file(kind, moving_picture(28, (84, 60)), FPS, tone(3.5))
    # 3.5 s: 7 frames at two per second, of which a grid takes two.
    expected = rows(engine, as_tensors(folder, content, [0, 4, 9, 14, 18, 23], hears=hears))
    path = tmp_path / "video"
    path.write_bytes(content)
    url = f"data:video/{kind};base64,{b64encode(content).decode()}"
    forms: list[Any] = [VideoPrompt(form, use_audio=hears) for form in (path, content, url)]
    if hears:
        forms.append(str(path))
    for form in forms:
        assert_same(rows(engine, form), expected)


def test_a_model_without_audio_reads_the_frames_of_a_file(
    seeded: Callable[[str], str], tmp_path: Path
) -> None:
    folder = seeded("qwen2_5_vl")
    engine = build(folder, None)
    path = tmp_path / "video"
    for kind in ("mp4", "webm"):
        content = video_file(kind, moving_picture(28, (84, 60)), FPS, tone(3.5))
        tensors = as_tensors(folder, content, [0, 4, 9, 14, 18, 23], hears=False)
        expected = rows(engine, tensors, "<|video_pad|>")
        path.write_bytes(content)
        for form in (str(path), content, VideoPrompt(path)):
            assert_same(rows(engine, form, "<|video_pad|>"), expected)


def test_a_model_with_timestamps_gets_those_of_the_frames_of_a_file(
    seeded: Callable[[str], str],
) -> None:
    folder = seeded("qwen3_vl")
    engine, content = build(folder, None), video_file("mp4", moving_picture(24, (84, 60)), 8)
    size = {"shortest_edge": 131, "longest_edge": 2090}
    tensors = as_tensors(folder, content, [0, 5, 9, 14, 18, 23], hears=False, size=size)
    dated = replace(tensors, timestamps=[5 / 16, 23 / 16, 41 / 16])
    found = {
        name: rows(engine, item, "<|video_pad|>")
        for name, item in (("file", content), ("dated", dated), ("even", tensors))
    }
    assert_same(found["file"], found["dated"])
    assert found["even"][0].shape != found["dated"][0].shape or not torch.allclose(
        found["even"][0], found["dated"][0], atol=1e-3
    )
    for times in ([0.5, 1.0], [0.5, 1.0, -1.0], [0.5, 1.0, "2"]):
        with pytest.raises(ValueError, match="video 0: timestamps must be 3 numbers of 0 or more"):
            rows(engine, replace(tensors, timestamps=times), "<|video_pad|>")


def test_a_file_shown_again_is_a_prefix_hit(engine: LLMEngine, talkie: bytes) -> None:
    prompt = shows(engine, 5, ("video", talkie), 6, 7)
    engine.reset_prefix_cache()
    engine.generate(prompt, GREEDY)
    (again,) = engine.generate(prompt, GREEDY)
    assert again.num_cached_tokens >= again.num_prompt_tokens - 8


@pytest.mark.parametrize(
    ("stated", "num_frames", "fps", "expected"),
    [
        ({}, 48, 24.0, [0, 12, 24, 36]),  # two per second, but at least four
        ({"min_frames": 2}, 48, 24.0, [0, 12, 24, 36]),
        ({"fps": 1.0, "min_frames": 2}, 48, 24.0, [0, 24]),
        ({}, 28, 8.0, [0, 4, 9, 14, 18, 23]),
        ({"max_frames": 5}, 48, 8.0, [0, 12, 24, 36]),
        ({"num_frames": 6, "fps": None}, 12, 24.0, [0, 2, 4, 6, 8, 10]),
        ({}, 3, 24.0, [0, 1]),
        ({}, 1, 24.0, [0]),
    ],
)
def test_frames_are_chosen_as_in_the_published_processors(
    stated: dict[str, Any], num_frames: int, fps: float, expected: list[int]
) -> None:
    info = VideoInfo(num_frames, fps, 64, 48, False)
    assert VideoSampling(**stated).choose(info, 2) == expected


@pytest.mark.parametrize(
    ("stated", "num_frames", "fps"),
    [
        ({}, 48, 24.0),
        ({"min_frames": 2}, 48, 24.0),
        ({}, 29, 8.0),
        ({"fps": 3.0}, 100, 12.5),
        ({"max_frames": 5}, 48, 8.0),
        ({"num_frames": 6, "fps": None}, 12, 24.0),
        ({}, 3, 24.0),
    ],
)
def test_frames_are_spread_as_in_the_published_processor(
    stated: dict[str, Any], num_frames: int, fps: float
) -> None:
    theirs: Any = SimpleNamespace(fps=2, min_frames=4, max_frames=768)
    vars(theirs).update(stated)
    metadata = SimpleNamespace(total_num_frames=num_frames, fps=fps)
    expected = Qwen3VLVideoProcessor.sample_frames(theirs, metadata, stated.get("num_frames"))
    indices = SpreadSampling(**stated).choose(VideoInfo(num_frames, fps, 64, 48, False), 2)
    assert indices == expected.tolist()


@pytest.mark.parametrize("max_video_tokens", [None, 12])
def test_frames_are_scaled_as_in_the_published_processor(max_video_tokens: int | None) -> None:
    most, least = 2**20, 4096
    theirs: Any = SimpleNamespace(max_video_tokens=max_video_tokens, cap_pixels_per_frame=None)
    stated = {
        **{"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2},
        "size": {"shortest_edge": least, "longest_edge": most},
        "cap_pixels_per_frame": max_video_tokens is not None,
    }
    ours = SpreadSampling(min_pixels=least, max_pixels=most, max_video_tokens=max_video_tokens)
    for count, height, width in ((2, 48, 64), (2, 32, 32), (12, 1080, 1920), (60, 320, 240)):
        sides = frame_size(height, width, 32, *ours.size(count, 2, 32).values())
        expected = Qwen3VLVideoProcessor.get_num_of_video_patches(
            theirs, count, height, width, stated
        )
        assert math.prod(sides) // 16**2 * count // 2 == expected


def test_a_video_with_too_few_frames_is_refused() -> None:
    with pytest.raises(ValueError, match="looks at 6 frames of a video, and this one has 4"):
        VideoSampling(num_frames=6, fps=None).choose(VideoInfo(4, 8.0, 64, 48, False), 2)


def test_a_single_frame_is_duplicated(folder: str) -> None:
    content = video_file("mp4", moving_picture(1, (56, 56)), FPS)
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    maker = VideoFeatureMaker(processor, VideoSampling(min_pixels=784, max_pixels=12_544))
    features: Any = maker.read(content, hears=True, check_rows=lambda _: None)
    assert features.video_grid_thw == (1, 4, 4) and features.audio is None
    halves = features.pixel_values_videos.view(16, 3, 2, 196)
    assert torch.equal(halves[:, :, 0], halves[:, :, 1])


def test_video_sampling_is_loaded_from_the_checkpoint(tmp_path: Path) -> None:
    assert VideoSampling.load(tmp_path) == VideoSampling()
    own = {"fps": 1, "size": {"shortest_edge": 784, "longest_edge": 7840}, "max_frames": 16}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(own))
    assert VideoSampling.load(tmp_path) == VideoSampling(
        fps=1.0, max_frames=16, min_pixels=784, max_pixels=7840
    )
    nested = {"video_processor": {"num_frames": 8, "min_pixels": 800}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert VideoSampling.load(tmp_path) == VideoSampling(fps=None, num_frames=8, min_pixels=800)


def test_frames_share_the_maximum_pixels_of_a_video(tmp_path: Path) -> None:
    """As in transformers' video processor if the checkpoint requests it."""
    stated: dict[str, Any] = {"size": {"shortest_edge": 3136, "longest_edge": 602_112}}
    file = tmp_path / "video_preprocessor_config.json"
    capped = {"cap_pixels_per_frame": True, "max_video_tokens": 1000}
    for more, few, many in (({}, 602_112, 602_112), (capped, 352_800, 14_112)):
        file.write_text(json.dumps(stated | more))
        sampling = VideoSampling.load(tmp_path)
        assert sampling.size(4, 2, 28) == {"shortest_edge": 3136, "longest_edge": few}
        assert sampling.size(100, 2, 28) == {"shortest_edge": 3136, "longest_edge": many}
    assert sampling.size(768, 2, 28)["longest_edge"] == 3292  # at least 1.05 times the minimum
    file.write_text(json.dumps(stated | {"cap_pixels_per_frame": True}))
    assert VideoSampling.load(tmp_path).max_video_tokens == 128_000


WRONG_SETTINGS = {
    '{"cap_pixels_per_frame": true, "max_video_tokens": 0}': "max_video_tokens must be an integer",
    '{"fps": 0}': r"video_preprocessor_config\.json: fps must be a number of more than 0, got 0",
    '{"fps": "fast"}': "fps must be a number",
    '{"fps": 1, "num_frames": 4}': "fps and num_frames exclude each other",
    '{"max_frames": 0}': "max_frames must be an integer of 1 or more, got 0",
    '{"size": 3}': "size must be a mapping, got 3",
    "[]": "must hold a JSON object, got list",
    "{": r"video_preprocessor_config\.json is no valid JSON",
}


@pytest.mark.parametrize("content", WRONG_SETTINGS)
def test_invalid_settings_are_refused_by_file_and_key(tmp_path: Path, content: str) -> None:
    (tmp_path / "video_preprocessor_config.json").write_text(content)
    with pytest.raises(ValueError, match=WRONG_SETTINGS[content]):
        VideoSampling.load(tmp_path)


def test_a_video_too_long_for_the_model_is_refused_after_one_frame(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.inputs import multimodal_inputs

    decoded = []

    def counting(*args: Any) -> Any:
        for frame in read_frames(*args):
            decoded.append(frame)
            yield frame

    monkeypatch.setattr(multimodal_inputs, "read_frames", counting)
    long = video_file("mp4", moving_picture(240, (112, 112)), 2)
    with pytest.raises(ValueError, match="video 0: the prompt has 1920 tokens, but max_model_len"):
        engine.generate(shows(engine, 5, ("video", long), 6), GREEDY)
    assert len(decoded) == 1


def test_a_bad_file_fails_alone(engine: LLMEngine, talkie: bytes, tmp_path: Path) -> None:
    (tmp_path / "no.mp4").write_text("no video")
    bad = {
        tmp_path / "no.mp4": "video 0: .*it is neither mp4 nor webm",
        tmp_path / "missing.mp4": "No such file",
        talkie[:2000]: "video 0: the video cannot be read as a video",
    }
    engine.add_request("good", shows(engine, 5, ("video", talkie), 6), GREEDY)
    for item, message in bad.items():
        with pytest.raises(ValueError, match=message):
            engine.add_request("bad", shows(engine, 5, ("video", item), 6), GREEDY)
    while engine.has_unfinished_requests:
        outputs = engine.step()
    assert [(output.request_id, output.error) for output in outputs] == [("good", None)]
    engine.check_integrity()
