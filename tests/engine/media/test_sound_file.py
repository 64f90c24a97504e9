"""Sound files of every format are read as written; invalid or false ones are refused."""

from __future__ import annotations

import logging
import struct
import tracemalloc
import wave
from base64 import b64encode
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
import soxr
import torch
from numpy.typing import NDArray

from engine import Waveform
from engine.interface.config import MediaLimits
from engine.media.media_source import MediaSource
from engine.media.sound_file import (
    LongestSound,
    SampleReader,
    read_sound,
    stated_duration,
)


def read_wav(path: Path, *, longest_s: float) -> tuple[np.ndarray, int]:
    return read_sound(MediaSource(path, "audio", 2**28), longest=LongestSound(longest_s))


def encode(eighths: list[int], width: int) -> bytes:
    """Encode samples in 128ths, exact in every width; only single bytes are unsigned."""
    if width == 1:
        return bytes(value + 128 for value in eighths)
    return b"".join((v << 8 * (width - 1)).to_bytes(width, "little", signed=True) for v in eighths)


PLAIN_SUFFIX = bytes.fromhex("0000 1000 8000 00aa00389b71")


def chunk(name: bytes, content: bytes) -> bytes:
    return name + struct.pack("<I", len(content)) + content + bytes(len(content) % 2)


def riff(*chunks: bytes, size: int | None = None) -> bytes:
    content = b"WAVE" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(content) if size is None else size) + content


def fmt(
    kind: int = 1,
    channels: int = 1,
    rate: int = 1000,
    bits: int = 16,
    *,
    extensible: bool = False,
    align: int | None = None,
    valid: int | None = None,
) -> bytes:
    frame = channels * ((bits + 7) // 8) if align is None else align
    shown = 0xFFFE if extensible else kind
    content = struct.pack("<HHIIHH", shown, channels, rate, rate * frame, frame, bits)
    if extensible:
        content += struct.pack("<HHI", 22, bits if valid is None else valid, 0)
        content += struct.pack("<I", kind) + PLAIN_SUFFIX
    return chunk(b"fmt ", content)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(riff(fmt(), chunk(b"data", data)))
    return path


def read(path: Path, content: bytes) -> np.ndarray:
    path.write_bytes(content)
    return read_wav(path, longest_s=1.0)[0]


def test_the_longest_allowed_file_is_read_and_a_longer_one_is_not(tmp_path: Path) -> None:
    path = write(tmp_path / "a.wav", bytes(2 * 1500))
    assert len(read_wav(path, longest_s=1.5)[0]) == 1500
    longer = write(tmp_path / "b.wav", bytes(2 * 1510))
    message = r"b\.wav' is 1\.51 s long, but the model takes 1\.5 s at most"
    with pytest.raises(ValueError, match=message):
        read_wav(longer, longest_s=1.5)


def test_a_file_cut_off_in_a_sample_loses_it_and_a_shorter_one_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.wav", encode([1, 2, 3], 2))
    path.write_bytes(path.read_bytes()[:-1])
    np.testing.assert_array_equal(read_wav(path, longest_s=1.0)[0], np.array([1, 2]) / 128)
    path = write(tmp_path / "a.wav", bytes(2 * 100))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="cut off: its header states 100 samples, it holds 90"):
        read_wav(path, longest_s=1.5)


def wrong_format(**changes: object) -> bytes:
    return riff(fmt(**changes), chunk(b"data", bytes(48)))


NONE_OF = "cannot be read: it is none of WAV of PCM or float samples, FLAC, OGG .* or webm"
NO_SOUND = "cannot be read as sound: "
NO_WAV = "is no WAV file that can be read: "
NOT_PCM = "and what is read is WAV of PCM or float samples, FLAC"

WRONG = {
    "nothing": (b"", NONE_OF),
    "text": (b"hello, this is a text and no sound\n" * 9, NONE_OF),
    "a header alone": (b"RIFF\x04\0\0\0WAVE", f"{NO_WAV}it ends before its samples"),
    "a header of FLAC": (b"fLaC\0\0\0\x22" + bytes(60), NO_SOUND),
    "a header of OGG": (b"OggS" + bytes(60), NO_SOUND),
    "a header of MP3": (b"ID3" + bytes(600), NO_SOUND),
    "another RIFF file": (b"RIFF\x04\0\0\0AVI " + bytes(60), "it does not begin as one"),
    "AIFF": (b"FORM\0\0\0\x04AIFF" + bytes(60), NONE_OF),
    "RF64": (b"RF64\xff\xff\xff\xffWAVE" + bytes(60), NONE_OF),
    "ADPCM": (wrong_format(kind=2, bits=4), NO_SOUND),
    "A-law": (wrong_format(kind=6, bits=8), f"is WAV of ALAW, {NOT_PCM}"),
    "mu-law": (wrong_format(kind=7, bits=8), f"is WAV of ULAW, {NOT_PCM}"),
    "a strange kind": (wrong_format(kind=4711), NO_SOUND),
    "extensible mu-law": (wrong_format(kind=7, bits=8, extensible=True), NOT_PCM),
    "extensible in itself": (wrong_format(kind=0xFFFE, extensible=True), NO_SOUND),
    "no extension": (wrong_format(kind=0xFFFE), NO_SOUND),
    "half a format": (riff(chunk(b"fmt ", bytes(14))), "its format ends too early"),
    "no channels": (wrong_format(channels=0), "it states 0 channels of 16 bits"),
    "many channels": (wrong_format(channels=65), "has 65 channels, and 64 are the most"),
    "no rate": (wrong_format(rate=0), NO_SOUND),
    "a low rate": (wrong_format(rate=999), "sampling rate of 999 .* 1000 to 384000; resample it"),
    "a high rate": (wrong_format(rate=4_000_037), "has a sampling rate of 4000037 samples per sec"),
    "no bits": (wrong_format(bits=0), "it states 1 channels of 0 bits"),
    "wide integers": (wrong_format(bits=64), NO_SOUND),
    "half floats": (wrong_format(kind=3, bits=16), NO_SOUND),
    "a wrong frame": (wrong_format(channels=2, align=3), "states 16 samples, it holds 12"),
    "no samples": (riff(fmt()), "it ends before its samples"),
    "no format": (riff(chunk(b"data", bytes(4))), "its samples come before their format"),
    "a late format": (riff(chunk(b"data", b"12"), fmt()), "come before their format"),
    "zeros": (riff(bytes(9000)), "none of its first 1000 chunks holds samples"),
    "an endless chunk": (riff(b"LIST\xff\xff\xff\xff" + fmt()), "it ends before its samples"),
}


def encoded(kind: str, samples: NDArray[np.float32], rate: int) -> bytes:
    """Return samples as a phone or a browser records them."""
    file = BytesIO()
    codec, layout = ("libopus", "stereo") if kind == "webm" else ("aac", "mono")
    with av.open(
        file, "w", format={"m4a": "mp4", "webm": "webm", "aac": "adts"}[kind]
    ) as container:
        track: Any = container.add_stream(codec, rate=rate)
        track.layout = layout
        rows = np.stack([samples] * track.channels)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(rows), "fltp", layout)
        frame.rate = rate
        for packet in (*track.encode(frame), *track.encode(None)):
            container.mux(packet)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["m4a", "webm", "aac"])
def test_recordings_of_phones_and_browsers_are_read(kind: str, tmp_path: Path) -> None:
    rate = 48_000
    # A tone that rises, so that it is alike to itself only where it should be.
    samples = np.sin(np.linspace(0, 30, rate) ** 2 * 3).astype(np.float32) / 2
    content = encoded(kind, samples, rate)
    path = tmp_path / "recording"
    path.write_bytes(content)
    source = MediaSource(path, "audio", 2**20)
    found, own_rate = read_sound(source, longest=LongestSound(2.0), rate=16_000)
    assert own_rate == rate and len(found) == pytest.approx(16_000, abs=2000)
    # Codecs add some milliseconds before the sound: compare where both are alike.
    expected = soxr.resample(samples, rate, 16_000)[4000:12_000]
    likeness = np.correlate(found, expected, "valid").max() / float(expected @ expected)
    assert likeness == pytest.approx(1, abs=0.1)
    seconds = stated_duration(source)
    assert seconds is None or seconds == pytest.approx(1, abs=0.2)
    with pytest.raises(ValueError, match="is .* s long, but the model takes 0.5 s at most"):
        read_sound(source, longest=LongestSound(0.5))
    # The other two are written as streams, which state no length.
    for broken in (content[:40], *([content[: len(content) // 8]] if kind == "m4a" else [])):
        with pytest.raises(ValueError, match=r"cannot be read|is empty|has 0 samples"):
            read_sound(MediaSource(broken, "audio", 2**20), longest=LongestSound(2.0))


@pytest.mark.parametrize("kind", WRONG)
def test_invalid_sound_files_are_refused(kind: str, tmp_path: Path) -> None:
    content, expected = WRONG[kind]
    path = tmp_path / "a.wav"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=expected):
        read_wav(path, longest_s=1.0)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no\.wav' cannot be read: No such file"):
        read_wav(tmp_path / "no.wav", longest_s=1.0)
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_wav(tmp_path, longest_s=1.0)


KINDS = [(1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64)]


def noise(kind: int, bits: int, count: int) -> bytes:
    draw = np.random.default_rng(bits + kind)
    if kind == 3:
        return (2 * draw.standard_normal(count)).astype(f"<f{bits // 8}").tobytes()
    return draw.bytes(count * bits // 8)


def as_scipy_reads(path: Path) -> np.ndarray:
    """Samples read by scipy, in -1 to 1 and averaged; it reads 24 bits as the upper ones of 32."""
    _, found = pytest.importorskip("scipy.io.wavfile").read(path)
    if found.dtype == np.uint8:
        found = (found.astype(np.float64) - 128) / 128
    elif found.dtype.kind == "i":
        found = found / 2.0 ** (8 * found.dtype.itemsize - 1)
    return found.reshape(len(found), -1).mean(axis=1, dtype=np.float64).astype(np.float32)


@pytest.mark.parametrize("channels", [1, 2, 6])
@pytest.mark.parametrize("extensible", [False, True])
@pytest.mark.parametrize(("kind", "bits"), KINDS)
def test_every_kind_of_wav_is_read_as_by_scipy(
    kind: int, bits: int, extensible: bool, channels: int, tmp_path: Path
) -> None:
    header = fmt(kind, channels, bits=bits, extensible=extensible)
    data = noise(kind, bits, 57 * channels)
    found = read(tmp_path / "a.wav", riff(header, chunk(b"data", data)))
    assert found.dtype == np.float32
    assert found.shape == (57,)
    np.testing.assert_array_equal(found, as_scipy_reads(tmp_path / "a.wav"))


@pytest.mark.parametrize("dtype", ["<f4", "<f8"])
def test_floats_beyond_1_are_kept(dtype: str, tmp_path: Path) -> None:
    values = np.array([0.5, -3.0, 1e6], dtype)
    header = fmt(3, bits=8 * values.itemsize)
    found = read(tmp_path / "a.wav", riff(header, chunk(b"data", values.tobytes())))
    np.testing.assert_array_equal(found, values.astype(np.float32))


@pytest.mark.parametrize("extensible", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("channels", [1, 2])
def test_floats_that_are_not_finite_or_too_large_are_refused(
    value: float, extensible: bool, channels: int, tmp_path: Path
) -> None:
    header = fmt(3, channels, bits=64, extensible=extensible)
    data = chunk(b"data", np.array([0.0, 0.5, value, 0.0]).tobytes())
    with pytest.raises(ValueError, match=r"a\.wav' holds samples that are NaN, infinite or too"):
        read(tmp_path / "a.wav", riff(header, data))


def test_opposite_infinities_of_two_channels_are_refused(tmp_path: Path) -> None:
    data = chunk(b"data", np.array([np.inf, -np.inf], "<f4").tobytes())
    with pytest.raises(ValueError, match="NaN, infinite"):
        read(tmp_path / "a.wav", riff(fmt(3, 2, bits=32), data))


@pytest.mark.parametrize("valid", [0, 20, 24])
def test_valid_bits_are_the_upper_ones(valid: int, tmp_path: Path) -> None:
    header = fmt(bits=24, extensible=True, valid=valid)
    found = read(tmp_path / "a.wav", riff(header, chunk(b"data", encode([-128, 3], 3))))
    np.testing.assert_array_equal(found, np.array([-128, 3]) / 128)


def test_other_chunks_of_odd_sizes_are_skipped(tmp_path: Path) -> None:
    others = chunk(b"LIST", b"data"), chunk(b"JUNK", bytes(5)), chunk(b"fact", bytes(4))
    content = riff(others[1], fmt(bits=8), *others, chunk(b"data", encode([1, 2, 3], 1)), others[0])
    np.testing.assert_array_equal(read(tmp_path / "a.wav", content), np.array([1, 2, 3]) / 128)


@pytest.mark.parametrize("size", [0, 2**31 - 1, 2**31 - 44, 2**32 - 1, 2**32 - 45])
@pytest.mark.parametrize("extensible", [False, True])
def test_a_stream_may_state_any_placeholder_size(
    size: int, extensible: bool, tmp_path: Path
) -> None:
    data = b"data" + struct.pack("<I", size) + encode([1, 2, 3], 2)
    content = riff(fmt(extensible=extensible), data, size=size)
    np.testing.assert_array_equal(read(tmp_path / "a.wav", content), np.array([1, 2, 3]) / 128)


def test_a_stream_with_the_header_of_an_empty_file_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.wav", b"")
    content = path.read_bytes() + encode([1, 2, 3], 2)
    np.testing.assert_array_equal(read(path, content), np.array([1, 2, 3]) / 128)


def test_chunks_after_an_empty_data_chunk_are_not_samples(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is empty: it holds no samples"):
        read(tmp_path / "a.wav", riff(fmt(), chunk(b"data", b""), chunk(b"LIST", bytes(20))))


@pytest.mark.parametrize("stated", [2**30, 2**32 - 1])
def test_a_file_that_is_too_long_is_refused_without_reading_it(stated: int, tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(riff(fmt(), b"data" + struct.pack("<I", stated)))
    with path.open("r+b") as file:
        file.truncate(44 + 2**30)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"a\.wav' has 1073741868 bytes, but 268435456 are"):
            read_wav(path, longest_s=1.0)
        with path.open("r+b") as file:
            file.truncate(44 + 2**27)
        # Cut off or a stream: the length is that of the file, too long in either case.
        with pytest.raises(ValueError, match=r"a\.wav' is 67108\.86 s long"):
            read_wav(path, longest_s=1.0)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


RATE = 48_000
CODECS = {
    "flac": "PCM_16",
    "wav": "PCM_16",
    "ogg": "VORBIS",
    "opus": "OPUS",
    "mp3": "MPEG_LAYER_III",
}
LOSSLESS = ("flac", "wav")


def tone(seconds: float = 1.0, rate: int = RATE) -> np.ndarray:
    return 0.4 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)


def written(kind: str, samples: np.ndarray, rate: int = RATE, subtype: str | None = None) -> bytes:
    file = BytesIO()
    format = "OGG" if kind == "opus" else kind.upper()
    soundfile.write(file, samples, rate, subtype or CODECS[kind], format=format)
    return file.getvalue()


def heard(given: str | Path | bytes, seconds: float = 10.0) -> tuple[np.ndarray, int]:
    return read_sound(MediaSource(given, "audio", 2**20), longest=LongestSound(seconds))


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("channels", [1, 2])
def test_a_tone_is_read_in_every_format_and_form(kind: str, channels: int, tmp_path: Path) -> None:
    samples = tone()
    content = written(kind, np.stack([samples] * channels, axis=1))
    path = tmp_path / "no ending"
    path.write_bytes(content)
    url = f"data:audio/{kind};base64,{b64encode(content).decode()}"
    forms = [heard(form) for form in (path, str(path), content, url)]
    for found, rate in forms:
        assert rate == RATE
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, forms[0][0])
        assert np.abs(found[2_400:45_600] - samples[2_400:45_600]).max() < 0.05
        if kind in LOSSLESS:
            assert np.abs(found - samples).max() < 2**-15


@pytest.mark.parametrize("bits", [8, 16, 24])
def test_flac_of_every_width_is_exact(bits: int) -> None:
    samples = np.arange(-128, 128) / 128
    subtype = "PCM_S8" if bits == 8 else f"PCM_{bits}"
    found, _ = heard(written("flac", samples, subtype=subtype))
    np.testing.assert_array_equal(found, samples.astype(np.float32))


def test_flac_is_resampled_to_the_rate_of_the_model() -> None:
    content = written("flac", tone(1.0, 22_050), 22_050)
    found = SampleReader(16_000, 32_000).read(content)
    assert len(found) == 16_000
    assert np.abs(found[800:15_200] - tone(1.0, 16_000)[800:15_200]).max() < 1e-3


def with_stated_length(flac: bytes, frames: int) -> bytes:
    """Change the number of samples stated by a FLAC file, a field of 36 bits; 0 is unknown."""
    content = bytearray(flac)
    content[21] = content[21] & 0xF0 | frames >> 32
    content[22:26] = (frames & 0xFFFFFFFF).to_bytes(4, "big")
    return bytes(content)


def test_a_stream_of_unknown_length_is_read_to_its_end() -> None:
    found, _ = heard(with_stated_length(written("flac", tone()), 0))
    assert np.abs(found - tone()).max() < 2**-15
    with pytest.raises(ValueError, match=r"the audio is .* s long, but the model takes 0\.5 s at"):
        heard(with_stated_length(written("flac", tone(200 * 0.1)), 0), seconds=0.5)


def test_a_header_that_states_hours_is_refused_before_decoding() -> None:
    lie = with_stated_length(written("flac", tone()), 2**36 - 1)
    with pytest.raises(ValueError, match=r"the audio is 1431655\.\d+ s long"):
        heard(lie)


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("kept", [0.3, 0.7, 0.98])
def test_a_truncated_file_is_refused_or_logged(
    kind: str, kept: float, caplog: pytest.LogCaptureFixture
) -> None:
    content = written(kind, tone(2.0))
    cut = content[: round(kept * len(content))]
    if kind == "mp3" or kind == "opus":
        # The rest is valid sound; MP3 may only estimate its length, and OGG does not state it.
        try:
            found, _ = heard(cut)
        except ValueError as error:
            assert str(error).startswith("the audio ")
            return
        assert len(found) < 2 * RATE
        is_logged = "states 96000 samples and holds" in caplog.text
        assert is_logged == (kind == "mp3" and kept < 0.9)
        assert all(record.levelno == logging.WARNING for record in caplog.records)
        return
    with pytest.raises(ValueError, match=r"the audio (cannot be read|is cut off|is empty)"):
        heard(cut)


def test_limits_are_checked_before_work() -> None:
    small = MediaLimits(max_file_bytes=1000, max_audio_s=0.5)
    reader = SampleReader(16_000, 32_000, small)
    short = written("flac", np.zeros(4_000), 16_000)
    assert len(reader.read(short)) == 4_000
    with pytest.raises(ValueError, match=r"has \d+ bytes, but 1000 .*media_limits.max_file_bytes"):
        reader.read(written("wav", tone(0.1)))
    longer = written("flac", np.zeros(9_000), 16_000)
    for audio in (longer, np.zeros(9_000, np.float32)):
        with pytest.raises(ValueError, match=r"0\.56 s long, but 0\.5 s .*raise engine.media_l"):
            reader.read(audio)
    for rate in (999, 384_001, 4_000_037):
        with pytest.raises(ValueError, match=f"sampling rate of {rate} samples per second"):
            reader.read(np.zeros(9, np.float32), rate)


def test_the_samples_of_all_channels_are_limited() -> None:
    """Silence compresses well, so the decoded samples of all channels are counted."""
    content = written("flac", np.zeros((48_000, 8)), 48_000)
    with pytest.raises(ValueError, match=r"has 384000 samples in all channels, and 288000 are"):
        heard(content, seconds=1.5)
    assert len(heard(content, seconds=2.0)[0]) == 48_000


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 192_000])
def test_files_and_samples_are_resampled_to_the_same_bits(rate: int) -> None:
    samples = tone(0.7, rate).astype(np.float32)
    reader = SampleReader(16_000, None)
    content = written("wav", samples, rate, "FLOAT")
    np.testing.assert_array_equal(reader.read(content), reader.read(samples, rate))


def test_a_sound_without_samples_after_resampling_is_refused() -> None:
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
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=URLS[url]):
        heard(url)


def test_long_data_is_refused_before_it_is_decoded() -> None:
    url = "data:audio/wav;base64," + "A" * (2**21)
    with pytest.raises(ValueError, match=r"has 1572864 bytes, but 1048576 are the most"):
        heard(url)
    with pytest.raises(ValueError, match=r"has 1048577 bytes, but 1048576 are the most"):
        heard(bytes(2**20 + 1))


def test_a_long_name_is_shortened_in_the_error() -> None:
    with pytest.raises(ValueError, match="File name too long") as caught:
        heard("x" * 10_000)
    assert len(str(caught.value)) < 1_000


def test_saved_samples_are_read_back_to_half_a_step(tmp_path: Path) -> None:
    samples = torch.rand(4_000, generator=torch.Generator().manual_seed(0)) * 2 - 1
    Waveform(samples, 24_000).save(tmp_path / "a.wav")
    found, rate = heard(tmp_path / "a.wav")
    assert rate == 24_000
    # Written in steps of 1 / 32767, read in steps of 1 / 32768.
    assert np.abs(found * 32_768 / 32_767 - samples.numpy()).max() <= 0.5001 / 32_767


def test_loud_samples_are_clipped_and_not_wrapped(tmp_path: Path) -> None:
    Waveform(torch.tensor([1.0, 1.5, 99.0, -1.0, -7.0, 0.0]), 8_000).save(tmp_path / "a.wav")
    with wave.open(str(tmp_path / "a.wav"), "rb") as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 8_000)
        found = np.frombuffer(file.readframes(6), "<i2").tolist()
    assert found == [32_767] * 3 + [-32_767] * 2 + [0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_samples_are_rounded_as_by_torch(dtype: torch.dtype) -> None:
    chance = torch.Generator().manual_seed(0)
    halves = torch.tensor([0.5, 1.5, -2.5, 3e4 * 32_767], dtype=torch.float64)
    samples = torch.cat([torch.randn(5_000, generator=chance).double(), halves / 32_767]).to(dtype)
    scaled = samples.float().clamp(-1.0, 1.0) * 32_767
    found = np.frombuffer(Waveform(samples, 24_000).encoded("pcm16"), "<i2")
    assert np.array_equal(found, scaled.round().to(torch.int16).numpy())


def test_an_empty_waveform_is_saved(tmp_path: Path) -> None:
    Waveform(torch.zeros(0), 24_000).save(tmp_path / "a.wav")
    with wave.open(str(tmp_path / "a.wav"), "rb") as file:
        assert (file.getnframes(), file.getframerate()) == (0, 24_000)
    assert Waveform(torch.zeros(12_000), 24_000).duration_s == 0.5


@pytest.mark.parametrize(
    "samples",
    [
        torch.tensor([0.0, torch.nan]),
        torch.tensor([torch.inf]),
        torch.zeros(2, 3),
        torch.zeros(3, dtype=torch.int16),
    ],
)
def test_an_invalid_waveform_is_refused_and_leaves_no_file(
    tmp_path: Path, samples: torch.Tensor
) -> None:
    with pytest.raises(ValueError, match="finite floating point numbers"):
        Waveform(samples, 24_000).save(tmp_path / "a.wav")
    assert not (tmp_path / "a.wav").exists()


@pytest.mark.parametrize("format", ["flac", "ogg", "mp3", "WAV"])
@pytest.mark.parametrize("by_ending", [True, False])
def test_other_formats_are_chosen_by_name_or_ending(
    tmp_path: Path, format: str, by_ending: bool
) -> None:
    sound = Waveform(torch.from_numpy(tone(rate=24_000)), 24_000)
    path = tmp_path / (f"a.{format}" if by_ending else "a.partial")
    sound.save(path, None if by_ending else format)
    found, rate = heard(path)
    assert rate == 24_000
    # MP3 and OGG are close, and may be longer by a block.
    assert np.abs(found[2_000:22_000] - sound.samples.numpy()[2_000:22_000]).max() < 0.05


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *(
            (name, "written as wav, flac, ogg, mp3, got")
            for name in ("a", "a.txt", "a.wav.partial")
        ),
        ("a.mp3", "1001 samples per second cannot be written as mp3"),
    ],
)
def test_unknown_formats_and_unsupported_rates_are_refused(
    tmp_path: Path, name: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Waveform(torch.zeros(9), 1_001).save(tmp_path / name)
    assert not (tmp_path / name).exists()
