"""FLAC, OGG and MP3 give their sound in every form, and no more than they may."""

from __future__ import annotations

import logging
import os
from base64 import b64encode
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from engine.interface.config import MediaLimits
from engine.media.media_source import MediaSource
from engine.media.sound_file import LongestSound, SampleReader, read_sound

RATE = 48_000
KINDS = {
    "flac": "PCM_16",
    "wav": "PCM_16",
    "ogg": "VORBIS",
    "opus": "OPUS",
    "mp3": "MPEG_LAYER_III",
}
LOSSLESS = ("flac", "wav")


def tone(seconds: float = 1.0, rate: int = RATE) -> np.ndarray:
    return 0.4 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)


def encode(kind: str, samples: np.ndarray, rate: int = RATE, subtype: str | None = None) -> bytes:
    file = BytesIO()
    format = "OGG" if kind == "opus" else kind.upper()
    soundfile.write(file, samples, rate, subtype or KINDS[kind], format=format)
    return file.getvalue()


def read(given: str | Path | bytes, seconds: float = 10.0) -> tuple[np.ndarray, int]:
    return read_sound(MediaSource(given, "audio", 2**20), longest=LongestSound(seconds))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels", [1, 2])
def test_a_tone_is_heard_in_every_format_and_form(kind: str, channels: int, tmp_path: Path) -> None:
    samples = tone()
    content = encode(kind, np.stack([samples] * channels, axis=1))
    path = tmp_path / "no ending"
    path.write_bytes(content)
    url = f"data:audio/{kind};base64,{b64encode(content).decode()}"
    heard = [read(form) for form in (path, str(path), content, url)]
    for found, rate in heard:
        assert rate == RATE
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, heard[0][0])
        assert np.abs(found[2_400:45_600] - samples[2_400:45_600]).max() < 0.05
        if kind in LOSSLESS:
            assert np.abs(found - samples).max() < 2**-15


@pytest.mark.parametrize("bits", [8, 16, 24])
def test_flac_of_every_width_gives_the_samples_back(bits: int) -> None:
    samples = np.arange(-128, 128) / 128
    subtype = "PCM_S8" if bits == 8 else f"PCM_{bits}"
    found, _ = read(encode("flac", samples, subtype=subtype))
    np.testing.assert_array_equal(found, samples.astype(np.float32))


def test_flac_of_22050_samples_a_second_becomes_what_a_model_of_16000_wants() -> None:
    content = encode("flac", tone(1.0, 22_050), 22_050)
    found = SampleReader(16_000, 32_000).read(content)
    assert len(found) == 16_000
    assert np.abs(found[800:15_200] - tone(1.0, 16_000)[800:15_200]).max() < 1e-3


def unknown_length(flac: bytes, frames: int) -> bytes:
    """Other numbers of samples in the first block of a FLAC file, 36 bits of it; 0 is unknown."""
    content = bytearray(flac)
    content[21] = content[21] & 0xF0 | frames >> 32
    content[22:26] = (frames & 0xFFFFFFFF).to_bytes(4, "big")
    return bytes(content)


def test_a_stream_that_does_not_know_its_length_is_read_to_its_end() -> None:
    found, _ = read(unknown_length(encode("flac", tone()), 0))
    assert np.abs(found - tone()).max() < 2**-15
    with pytest.raises(ValueError, match=r"the audio is .* s long, but the model takes 0\.5 s at"):
        read(unknown_length(encode("flac", tone(200 * 0.1)), 0), seconds=0.5)


def test_a_header_that_claims_hours_is_refused_before_anything_is_decoded() -> None:
    lie = unknown_length(encode("flac", tone()), 2**36 - 1)
    with pytest.raises(ValueError, match=r"the audio is 1431655\.\d+ s long"):
        read(lie)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [0.3, 0.7, 0.98])
def test_what_lost_its_end_is_refused_or_told(
    kind: str, kept: float, caplog: pytest.LogCaptureFixture
) -> None:
    content = encode(kind, tone(2.0))
    cut = content[: round(kept * len(content))]
    if kind == "mp3" or kind == "opus":
        # What is there is sound; MP3 may only estimate its length, and OGG does not state it.
        try:
            found, _ = read(cut)
        except ValueError as error:
            assert str(error).startswith("the audio ")
            return
        assert len(found) < 2 * RATE
        is_told = "states 96000 samples and holds" in caplog.text
        assert is_told == (kind == "mp3" and kept < 0.9)
        assert all(record.levelno == logging.WARNING for record in caplog.records)
        return
    with pytest.raises(ValueError, match=r"the audio (cannot be read|is cut off|is empty)"):
        read(cut)


def test_limits_come_before_work() -> None:
    small = MediaLimits(max_file_bytes=1000, max_audio_s=0.5)
    reader = SampleReader(16_000, 32_000, small)
    short = encode("flac", np.zeros(4_000), 16_000)
    assert len(reader.read(short)) == 4_000
    with pytest.raises(ValueError, match=r"has \d+ bytes, but 1000 .*media_limits.max_file_bytes"):
        reader.read(encode("wav", tone(0.1)))
    longer = encode("flac", np.zeros(9_000), 16_000)
    for audio in (longer, np.zeros(9_000, np.float32)):
        with pytest.raises(
            ValueError, match=r"0\.56 s long, but 0\.5 s are .*raise engine.media_l"
        ):
            reader.read(audio)
    for rate in (999, 384_001, 4_000_037):
        with pytest.raises(ValueError, match=f"sampling rate of {rate} samples per second"):
            reader.read(np.zeros(9, np.float32), rate)


def test_a_short_file_with_hours_of_work_in_it_is_refused() -> None:
    """Silence packs well: what is in a file is counted, in all channels."""
    content = encode("flac", np.zeros((48_000, 8)), 48_000)
    with pytest.raises(ValueError, match=r"has 384000 samples in all channels, and 288000 are"):
        read(content, seconds=1.5)
    assert len(read(content, seconds=2.0)[0]) == 48_000


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 192_000])
def test_files_and_samples_are_resampled_to_the_same_bits(rate: int) -> None:
    samples = tone(0.7, rate).astype(np.float32)
    reader = SampleReader(16_000, None)
    content = encode("wav", samples, rate, "FLOAT")
    np.testing.assert_array_equal(reader.read(content), reader.read(samples, rate))


def test_so_little_that_nothing_is_left_is_refused() -> None:
    with pytest.raises(ValueError, match="too short: 1 samples of 48000 per second are none of"):
        SampleReader(16_000, 32_000).read(np.zeros(1, np.float32), 48_000)


URLS = {
    "data:audio/wav,abc": "data URL that is not base64; it must begin like 'data:audio/",
    "data:audio/wav;base64": "data URL that is not base64",
    "data:;base64,?!": "data URL of broken base64",
    "data:audio/wav;base64,AAAA": "cannot be read: it is none of WAV",
    "https://example.org/a.wav": "is a web address, and nothing is fetched from there",
}


@pytest.mark.parametrize("url", URLS)
def test_urls_that_are_no_data_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=URLS[url]):
        read(url)


def test_long_data_is_refused_before_it_is_decoded() -> None:
    url = "data:audio/wav;base64," + "A" * (2**21)
    with pytest.raises(ValueError, match=r"has 1572864 bytes, but 1048576 are the most"):
        read(url)
    with pytest.raises(ValueError, match=r"has 1048577 bytes, but 1048576 are the most"):
        read(bytes(2**20 + 1))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="cannot be read: it is a named pipe"):
        read(tmp_path / "pipe")


def test_a_long_name_is_not_told_whole() -> None:
    with pytest.raises(ValueError, match="File name too long") as caught:
        read("x" * 10_000)
    assert len(str(caught.value)) < 1_000


WHOLE = {kind: encode(kind, tone(0.2)) for kind in KINDS}


@given(
    kind=st.sampled_from(sorted(KINDS)),
    keep=st.floats(0, 1),
    damage=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=6),
)
def test_a_damaged_file_is_read_or_refused_by_name(
    kind: str, keep: float, damage: list[tuple[float, int]]
) -> None:
    content = bytearray(WHOLE[kind])
    for place, value in damage:
        # Headers are where lies are told.
        content[int(place**4 * (len(content) - 1))] = value
    try:
        found, rate = read(bytes(content[: round(keep * len(content))]), 2.0)
    except ValueError as error:
        assert str(error).startswith("the audio ")
    else:
        assert 0 < len(found) <= 2 * rate
        assert np.isfinite(found).all()
