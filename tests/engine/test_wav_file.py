"""WAV files of every width give the samples that were written; all others are refused by name."""

from __future__ import annotations

import struct
import wave
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.wav_file import read_wav


def write(path: Path, data: bytes, *, width: int = 2, channels: int = 1, rate: int = 100) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data)
    return path


def encode(eighths: list[int], width: int) -> bytes:
    """Samples in 128ths, which every width can hold; only single bytes are unsigned."""
    if width == 1:
        return bytes(value + 128 for value in eighths)
    return b"".join((v << 8 * (width - 1)).to_bytes(width, "little", signed=True) for v in eighths)


samples = st.lists(st.integers(-128, 127), min_size=1, max_size=20)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@given(values=samples, rate=st.integers(100, 48_000))
def test_every_width_gives_the_samples_back(
    width: int, values: list[int], rate: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("wav") / "a.wav"
    write(path, encode(values, width), width=width, rate=rate)
    found, found_rate = read_wav(path, longest_s=1.0)
    assert found.dtype == np.float32
    assert found_rate == rate
    np.testing.assert_array_equal(found, np.array(values, np.float32) / 128)


@given(frames=st.lists(st.tuples(*[st.integers(-128, 127)] * 3), min_size=1, max_size=9))
def test_channels_are_averaged(
    frames: list[tuple[int, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("wav") / "a.wav"
    write(path, encode([v for frame in frames for v in frame], 2), channels=3)
    found, _ = read_wav(path, longest_s=1.0)
    np.testing.assert_allclose(found, np.array(frames).mean(axis=1) / 128, rtol=1e-6)


def test_the_longest_that_is_allowed_is_read_and_one_sample_more_is_not(tmp_path: Path) -> None:
    path = write(tmp_path / "a.wav", bytes(2 * 150))
    assert len(read_wav(path, longest_s=1.5)[0]) == 150
    longer = write(tmp_path / "b.wav", bytes(2 * 151))
    with pytest.raises(
        ValueError, match=r"b\.wav' is 1\.51 s long, but the model takes 1\.5 s at most"
    ):
        read_wav(longer, longest_s=1.5)


def test_a_file_that_was_written_as_a_stream_is_as_long_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "a.wav", bytes(2 * 100))
    data = bytearray(path.read_bytes())
    data[4:8] = data[40:44] = b"\xff\xff\xff\xff"  # the sizes of the file and of its samples
    path.write_bytes(data)
    found, _ = read_wav(path, longest_s=1.5)
    assert len(found) == 100


def test_a_file_that_was_cut_off_in_a_sample_loses_that_sample(tmp_path: Path) -> None:
    path = write(tmp_path / "a.wav", encode([1, 2, 3], 2))
    path.write_bytes(path.read_bytes()[:-1])
    np.testing.assert_array_equal(read_wav(path, longest_s=1.0)[0], np.array([1, 2]) / 128)


def test_a_file_that_lost_its_end_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.wav", bytes(2 * 100))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="cut off: its header states 100 samples, it holds 90"):
        read_wav(path, longest_s=1.5)


def float_wav() -> bytes:
    body = b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 3, 1, 100, 400, 4, 32)
    body += b"data" + struct.pack("<If", 4, 0.5)
    return b"RIFF" + struct.pack("<I", len(body)) + body


WRONG = {
    "nothing": (b"", "is not a WAV file of PCM samples: it ends too early"),
    "text": (b"hello, this is a text and no sound\n" * 9, "is not a WAV file of PCM samples"),
    "a header alone": (b"RIFF\x04\0\0\0WAVE", "is not a WAV file of PCM samples"),
    "other samples": (float_wav(), "is not a WAV file of PCM samples: unknown format: 3"),
    "a FLAC file": (b"fLaC\0\0\0\x22" + bytes(60), "is not a WAV file of PCM samples"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_wav_file_is_refused(kind: str, tmp_path: Path) -> None:
    content, expected = WRONG[kind]
    path = tmp_path / "a.wav"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=expected):
        read_wav(path, longest_s=1.0)


def test_a_file_without_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.wav' is empty: it holds no samples"):
        read_wav(write(tmp_path / "a.wav", b""), longest_s=1.0)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no\.wav' cannot be read: No such file"):
        read_wav(tmp_path / "no.wav", longest_s=1.0)
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_wav(tmp_path, longest_s=1.0)
