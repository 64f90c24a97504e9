"""Frames and sound of mp4 and webm, no more than they may have, and in step."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from engine.interface.config import MediaLimits
from engine.media.media_source import MediaSource
from engine.media.video_file import VideoInfo, probe_video, read_frames, read_soundtrack, upright
from tests.support.videos import FORMATS, moving_picture, video_file

LIMITS = MediaLimits()
FRAMES = moving_picture(12)
RATE = 48_000


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
def test_frames_are_those_that_were_written(
    kind: str, files: dict[str, bytes], tmp_path: Path
) -> None:
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
def test_sound_is_in_step_with_the_picture(kind: str, begins: float) -> None:
    content = video_file(kind, FRAMES, 8, tone(1.0), sound_begins=begins)
    sound = read_soundtrack(source(content), LIMITS)
    assert sound is not None
    samples, rate = sound
    assert rate == RATE and samples.dtype == np.float32
    start = round(begins * RATE)
    assert np.abs(samples[: max(0, start - 1_200)]).max(initial=0) < 0.05
    heard, expected = samples[start + 2_400 : start + 43_200], tone(1.0)[2_400:43_200]
    # A lossy codec, and by a millisecond at most beside its place.
    best = max(np.corrcoef(np.roll(heard, lag), expected)[0, 1] for lag in range(-48, 49))
    assert best > 0.99


def test_a_silent_film_has_no_sound() -> None:
    content = video_file("mp4", FRAMES)
    assert not probe_video(source(content), LIMITS).has_sound
    assert read_soundtrack(source(content), LIMITS) is None


def test_a_frame_is_turned_by_quarters() -> None:
    pixels = FRAMES[0]
    np.testing.assert_array_equal(upright(pixels, 0), pixels)
    np.testing.assert_array_equal(upright(pixels, 90), pixels.transpose(1, 0, 2)[::-1])
    np.testing.assert_array_equal(upright(pixels, -90), pixels[::-1].transpose(1, 0, 2))
    np.testing.assert_array_equal(upright(pixels, 180), pixels[::-1, ::-1])


@pytest.mark.parametrize("kind", FORMATS)
def test_limits_come_before_decoding(
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


def test_sound_that_goes_on_without_a_picture_is_refused() -> None:
    content = video_file("mp4", FRAMES[:2], 8, tone(3.0))
    probe_video(source(content), MediaLimits(max_video_s=1.0))
    with pytest.raises(ValueError, match="is longer than 1 s"):
        read_soundtrack(source(content), MediaLimits(max_video_s=1.0))


WRONG = {
    b"": "cannot be read: it is neither mp4 nor webm",
    b"#EXTM3U\nhttp://example.org/a.ts\n": "cannot be read: it is neither mp4 nor webm",
    b"RIFF\x04\0\0\0AVI " + bytes(60): "cannot be read: it is neither mp4 nor webm",
    b"\0\0\0\x20ftypisom" + bytes(60): "the video (cannot be read as a video|holds no moving)",
    b"\x1aE\xdf\xa3" + bytes(60): "the video (cannot be read as a video|holds no moving)",
}


@pytest.mark.parametrize("content", WRONG)
def test_what_is_no_video_is_refused(content: bytes) -> None:
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
def test_a_file_that_lost_its_end_is_refused(kind: str, files: dict[str, bytes]) -> None:
    """But webm, which does not state how long it is: that is as long as it is."""
    content = files[kind][: len(files[kind]) // 2]
    if kind == "webm":
        assert probe_video(source(content), LIMITS).num_frames < 12
        return
    with pytest.raises(ValueError, match=r"the video (cannot be read|is cut off|is damaged)"):
        chosen(content, list(range(12)))
