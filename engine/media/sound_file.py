"""Reads WAV, FLAC, OGG and MP3 as mono samples, through libsndfile; others through PyAV.

libsndfile silently reads the rest of a file that lost its end, and nothing of one that was written
as a stream and states no samples. So this module reads the expected number of sample bytes itself.

A WAV file is a sequence of chunks. Each has a name, its size in bytes, its content, and a padding
byte if the size is odd, so that the next one begins at an even offset::

    RIFF size WAVE                                      the file
      fmt  size  kind channels rate bytes/s align bits  format of the samples
                 [length valid speakers subformat]      only if kind is EXTENSIBLE
      LIST size  ...                                    also fact, JUNK and others: skipped
      data size  first sample of every channel, second of every channel, ..."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from numbers import Real
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray
from soundfile import LibsndfileError, SoundFile
from torch import Tensor
from transformers import AutoFeatureExtractor

from engine.interface.arguments import check_argument, check_dense
from engine.interface.config import MediaLimits
from engine.interface.log_fields import package_logger
from engine.media.media_source import MediaSource
from engine.media.video_file import kind_of, read_soundtrack, stated_seconds


class SoundStream(SoundFile):
    """A sound file that is read sequentially.

    soundfile seeks after every read, which fails for unknown lengths and is inexact in MP3.
    """

    def seekable(self) -> bool:
        """Return False, so that soundfile does not seek."""
        return False


_STREAM_BYTES = 2**31 - 2**16
"""Sizes from here on are placeholders: writers of streams state about 2**31 or 2**32 bytes."""

_MAX_CHUNKS = 1000
"""Maximum chunks before the samples: a large file of zeros looks like very many empty chunks."""

_FMT_CHUNK = struct.Struct("<HHIIHH")


@dataclass(frozen=True, slots=True)
class WavHeader:
    """Location of the samples: offset of the first, and bytes of one of all channels.

    ``num_bytes`` of all samples is None for a file written as a stream, which cannot know.
    """

    begin: int
    num_bytes: int | None
    frame_bytes: int
    rate: int


def read_wav_header(file: BinaryIO) -> WavHeader:
    """Find the samples of a file that begins with ``RIFF``; ``ValueError`` if there are none."""
    head = file.read(12)
    if len(head) < 12 or head[8:] != b"WAVE":
        raise ValueError("it does not begin as one")
    frame: tuple[int, int] | None = None
    for name, size in _chunks(file):
        if name == b"fmt ":
            chunk = file.read(min(size, _FMT_CHUNK.size))
            if len(chunk) < _FMT_CHUNK.size:
                raise ValueError("its format ends too early")
            # libsndfile interprets the format of the samples.
            _, channels, rate, _, align, bits = _FMT_CHUNK.unpack(chunk)
            if not channels or not align:
                where = f"{channels} channels of {bits} bits in {align} bytes"
                raise ValueError(f"it states {where}")
            frame = int(align), int(rate)
        elif name == b"data":
            if frame is None:
                raise ValueError("its samples come before their format")
            begin, riff_size = file.tell(), int.from_bytes(head[4:8], "little")
            # A writer that cannot seek back leaves a huge number or 0. But an empty file also has
            # 0, and other chunks may follow there: then the size of the whole file includes them.
            counts_more = begin < 8 + riff_size and riff_size < _STREAM_BYTES
            is_known = size < _STREAM_BYTES and (size > 0 or counts_more)
            return WavHeader(begin, size if is_known else None, *frame)
    raise ValueError("it ends before its samples")


def _chunks(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield names and stated sizes of the chunks, with the file at the content of each."""
    begin = file.tell()
    for _ in range(_MAX_CHUNKS):
        file.seek(begin)
        head = file.read(8)
        if len(head) < 8:
            return
        size = int.from_bytes(head[4:], "little")
        yield head[:4], size
        begin += 8 + size + size % 2
    raise ValueError(f"none of its first {_MAX_CHUNKS} chunks holds samples")


class Resampler:
    """Resamples a stream of mono samples; the result does not depend on how it is cut."""

    def __init__(self, rate: int, wanted: int) -> None:
        self._rates = rate, wanted
        self._stream: Any = None
        self._num_fed = 0
        self._parts: list[NDArray[np.float32]] = []
        if rate != wanted:
            import soxr  # imported only if needed

            self._stream = soxr.ResampleStream(rate, wanted, 1, dtype="float32")

    def feed(self, samples: NDArray[np.float32]) -> None:
        """Resample the next samples, ``(n,)``, and keep the result for :meth:`finish`."""
        self._num_fed += len(samples)
        self._parts.append(self.resampled(samples))

    def finish(self, name: str) -> NDArray[np.float32]:
        """Return all samples, ``(n * wanted / rate,)``, rounded; ``ValueError`` if none."""
        self._parts.append(self.resampled(np.zeros(0, np.float32), last=True))
        samples = np.concatenate(self._parts)
        if not len(samples):
            rate, wanted = self._rates
            raise ValueError(
                f"{name} is too short: {self._num_fed} samples of {rate} per second are none of "
                f"{wanted}"
            )
        return samples

    def resampled(self, samples: NDArray[np.float32], *, last: bool = False) -> NDArray[np.float32]:
        """Add the next samples, ``(n,)``, and return the output available now; may be empty."""
        if self._stream is None:
            return samples
        return self._stream.resample_chunk(samples, last=last)


logger = package_logger(__name__)

_MIN_RATE, _MAX_RATE = 1_000, 384_000
"""Bounds of the samples per second of a channel. Recordings lie between these; resampling others
would need far too much memory."""

_MAX_CHANNELS = 64

_MAX_SAMPLES_PER_S = 2 * 96_000
"""Samples of all channels per second of the longest allowed sound; a shorter one may have more."""

_SOUND_FILE_PCM = ("PCM_U8", "PCM_S8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE")
_KINDS: Mapping[str, tuple[str, ...]] = {
    "WAV": _SOUND_FILE_PCM,
    "WAVEX": _SOUND_FILE_PCM,
    "FLAC": _SOUND_FILE_PCM,
    "OGG": ("VORBIS", "OPUS"),
    "MP3": ("MPEG_LAYER_I", "MPEG_LAYER_II", "MPEG_LAYER_III"),
}
_FORMATS = "WAV of PCM or float samples, FLAC, OGG (Vorbis, Opus), MP3, AAC, mp4 (m4a) or webm"
# libsndfile states its largest number for a length that is unknown before the end.
_UNKNOWN_FRAMES = 2**62
_BLOCK_SAMPLES = 2**20
# Share of the stated length that an MP3 must have, since it may only estimate its length.
_MIN_MP3_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class LongestSound:
    """Maximum length of a sound; ``setting`` is None if the limit is the model's window."""

    seconds: float
    setting: str | None = None


def read_sound(
    source: MediaSource, *, longest: LongestSound, rate: int | None = None
) -> tuple[NDArray[np.float32], int]:
    """Read a sound; channels are averaged. It is resampled while it is decoded, by blocks.

    Its rate, channels and length are checked before decoding, and decoding stops at the limit if a
    file is longer than it states.

    Args:
        rate: requested samples per second; None keeps the file's rate.

    Returns:
        Mono samples ``(num_samples,)`` in -1 to 1 (floats beyond stay), and the samples per second
        of the file itself.

    Raises:
        ValueError: it is unreadable, of another kind, cut off by more than a sample, beyond a
            limit, holds NaN or infinity, or has no samples.
    """
    name = source.name
    if _is_container(source):
        found = read_soundtrack(source, partial(check_duration, longest=longest, name=name))
        if found is None:
            raise ValueError(f"{name} is empty: it holds no samples")
        check_rate(found[1], name)
        resampler = Resampler(found[1], rate or found[1])
        resampler.feed(found[0])
        return resampler.finish(name), found[1]
    with source.open() as file:
        header = _read_header(file, name)
        if header is not None and header.num_bytes is None:
            target = _with_stated_size(file, header, longest, name)
        else:
            target = file
        with _open(target, name) as sound:
            check_rate(sound.samplerate, name)
            if sound.channels > _MAX_CHANNELS:
                raise ValueError(
                    f"{name} has {sound.channels} channels, and {_MAX_CHANNELS} are the most"
                )
            _check_length(
                sound, sound.frames if sound.frames < _UNKNOWN_FRAMES else 0, longest, name
            )
            resampler = Resampler(sound.samplerate, rate or sound.samplerate)
            samples, num_frames = _decode(sound, longest, resampler, name)
            _check_whole(sound, num_frames, header, name)
            return samples, int(sound.samplerate)


def stated_duration(source: MediaSource) -> float | None:
    """Return a sound's stated duration in seconds, or None; ``ValueError`` if unreadable."""
    if _is_container(source):
        return stated_seconds(source)
    with source.open() as file:
        _read_header(file, source.name)
        with _open(file, source.name) as sound:
            known = 0 < sound.frames < _UNKNOWN_FRAMES
            return sound.frames / sound.samplerate if known else None


def _is_container(source: MediaSource) -> bool:
    """Return True for the sound of an mp4 or webm, and AAC."""
    with source.open() as file:
        return kind_of(file.read(12)) is not None


def check_rate(rate: int, name: str) -> None:
    """Refuse an unsupported sampling rate."""
    if not _MIN_RATE <= rate <= _MAX_RATE:
        raise ValueError(
            f"{name} has a sampling rate of {rate} samples per second, and what is read has "
            f"{_MIN_RATE} to {_MAX_RATE}; resample it"
        )


def check_duration(seconds: float, longest: LongestSound, name: str) -> None:
    """Refuse a sound that is too long."""
    if seconds > longest.seconds:
        why = f"the model takes {longest.seconds:g} s at most: cut it into shorter pieces"
        if longest.setting is not None:
            why = (
                f"{longest.seconds:g} s are the most that are read: cut it into shorter pieces, or "
                f"raise {longest.setting}"
            )
        raise ValueError(f"{name} is {seconds:.2f} s long, but {why}")


def _read_header(file: BinaryIO, name: str) -> WavHeader | None:
    """Read the header of a WAV file; None for other kinds."""
    head = file.read(12)
    file.seek(0)
    # A tag, or the eleven set bits that begin every frame of MP3; libsndfile would try more kinds.
    is_mp3 = head[:3] == b"ID3" or (len(head) > 1 and head[0] == 0xFF and head[1] >= 0xE0)
    if head[:4] not in (b"RIFF", b"fLaC", b"OggS") and not is_mp3:
        raise ValueError(f"{name} cannot be read: it is none of {_FORMATS}; convert it")
    if head[:4] != b"RIFF":
        return None
    try:
        return read_wav_header(file)
    except ValueError as error:
        raise ValueError(f"{name} is no WAV file that can be read: {error}; convert it") from error
    finally:
        file.seek(0)


def _with_stated_size(
    file: BinaryIO, header: WavHeader, longest: LongestSound, name: str
) -> BinaryIO:
    """Load a file written as a stream into memory, with its actual size in the header."""
    num_frames = (file.seek(0, os.SEEK_END) - header.begin) // header.frame_bytes
    check_rate(header.rate, name)
    check_duration(num_frames / header.rate, longest, name)
    file.seek(0)
    content = bytearray(file.read())
    content[header.begin - 4 : header.begin] = (num_frames * header.frame_bytes).to_bytes(
        4, "little"
    )
    return BytesIO(content)


@contextmanager
def _open(file: BinaryIO, name: str) -> Iterator[SoundStream]:
    # A file descriptor avoids a Python call per read.
    target = file if isinstance(file, BytesIO) else file.fileno()
    if isinstance(target, int):
        os.lseek(target, 0, os.SEEK_SET)  # undo buffered reads
    try:
        with SoundStream(target, closefd=False) as sound:
            if sound.subtype not in _KINDS.get(sound.format, ()):
                raise ValueError(
                    f"{name} is {sound.format} of {sound.subtype}, and what is read is {_FORMATS}; "
                    "convert it"
                )
            yield sound
    except LibsndfileError as error:
        raise ValueError(f"{name} cannot be read as sound: {error.error_string}") from error


def _check_length(sound: SoundStream, num_frames: int, longest: LongestSound, name: str) -> None:
    """Refuse a sound with a too long duration or too many samples: all channels are decoded."""
    check_duration(num_frames / sound.samplerate, longest, name)
    limit = int(_MAX_SAMPLES_PER_S * longest.seconds)
    if num_frames * sound.channels > limit:
        raise ValueError(
            f"{name} has {num_frames * sound.channels} samples in all channels, and {limit} are "
            f"the most in {longest.seconds:g} s; resample it, or cut it into shorter pieces"
        )


def _decode(
    sound: SoundStream, longest: LongestSound, resampler: Resampler, name: str
) -> tuple[NDArray[np.float32], int]:
    """Decode block by block, average channels and resample; return samples and input frames."""
    block = max(1, _BLOCK_SAMPLES // sound.channels)
    num_found = 0
    while True:
        frames = sound.read(block, dtype="float64", always_2d=True)
        if not len(frames):
            break
        num_found += len(frames)
        _check_length(sound, num_found, longest, name)
        # The sum and the narrowing may overflow; both give infinity.
        with np.errstate(all="ignore"):
            samples = frames.mean(axis=1).astype(np.float32)
        if not np.isfinite(samples).all():
            raise ValueError(
                f"{name} holds samples that are NaN, infinite or too large for float32"
            )
        resampler.feed(samples)
    if not num_found:
        raise ValueError(f"{name} is empty: it holds no samples")
    return resampler.finish(name), num_found


def _check_whole(sound: SoundStream, found: int, header: WavHeader | None, name: str) -> None:
    """Refuse a truncated file, if it states its length."""
    stated = int(sound.frames)
    if header is not None and header.num_bytes is not None:
        stated = header.num_bytes // header.frame_bytes
    if stated >= _UNKNOWN_FRAMES:
        return
    if sound.format == "MP3":
        if found < _MIN_MP3_SHARE * stated:
            logger.warning("%s states %d samples and holds %d: is it whole?", name, stated, found)
    elif found + 1 < stated:
        raise ValueError(f"{name} is cut off: its header states {stated} samples, it holds {found}")


_NUMBERS = ("sampling_rate", "n_samples", "hop_length", "n_fft")


class SpectrogramExtractor(Protocol):
    """A transformers feature extractor for windows of a fixed length."""

    sampling_rate: int
    n_samples: int
    hop_length: int
    n_fft: int

    def __call__(self, raw_speech: Any, *, sampling_rate: int, **options: Any) -> Any:
        """Convert samples to a mapping with ``input_features``, ``(1, mel bins, frames)``."""


def load_extractor(path: Path, *, trust_remote_code: bool = False) -> SpectrogramExtractor:
    """Load the feature extractor of a checkpoint folder.

    Raises:
        ValueError: there is none, it makes no spectrograms of windows, cannot be created, or needs
            untrusted code.
    """
    try:
        extractor: Any = AutoFeatureExtractor.from_pretrained(
            path, trust_remote_code=trust_remote_code, local_files_only=not trust_remote_code
        )
    # Values of a wrong type make transformers raise arbitrary exceptions.
    except Exception as error:
        raise ValueError(f"the feature extractor in {path} cannot be loaded: {error}") from error
    for name in _NUMBERS:
        number = getattr(extractor, name, None)
        if not isinstance(number, int) or number < 1:
            raise ValueError(
                f"the feature extractor in {path}, a {type(extractor).__name__}, must make "
                f"spectrograms of windows of a fixed length, but its {name} is {number!r}"
            )
    return extractor


_MAX_SAMPLE = 2.0
"""Maximum sample: allows filters to overshoot 1, and detects integers that were not scaled."""


@dataclass(frozen=True, slots=True)
class SampleReader:
    """Converts sound to one sampling rate, and refuses sound longer than a window.

    Attributes:
        rate: samples per second of the result.
        max_samples: maximum samples at that rate; None uses only the limits.
    """

    rate: int
    max_samples: int | None
    limits: MediaLimits = field(default_factory=MediaLimits)

    @property
    def longest(self) -> LongestSound:
        """The window's length, or the user's limit if that is less."""
        if self.max_samples is not None and self.max_samples <= self.limits.max_audio_s * self.rate:
            return LongestSound(self.max_samples / self.rate)
        return LongestSound(self.limits.max_audio_s, "engine.media_limits.max_audio_s")

    def read(
        self, audio: str | Path | bytes | Tensor | NDArray[Any], sampling_rate: int | None = None
    ) -> NDArray[np.float32]:
        """Read a sound or mono samples, and resample.

        Args:
            audio: a file, its content, or a data URL, of WAV, FLAC, OGG, MP3, AAC, mp4 or webm; or
                floating-point samples ``(num_samples,)`` in -1 to 1.
            sampling_rate: samples per second; None: the file's own, or :attr:`rate`.

        Returns:
            ``(num_samples,)`` at :attr:`rate`.

        Raises:
            ValueError: another type, empty, not mono, not finite, longer than the window,
                unreadable, or of an unsupported sampling rate.
        """
        if isinstance(audio, str | Path | bytes):
            source = MediaSource(audio, "audio", self.limits.max_file_bytes)
            samples, file_rate = read_sound(source, longest=self.longest, rate=self.rate)
            if sampling_rate not in (None, file_rate):
                raise ValueError(
                    f"{source.name} has {file_rate} samples per second, but the prompt says "
                    f"sampling_rate={sampling_rate}; leave it out for files"
                )
        else:
            check_argument("sampling_rate", sampling_rate, Real | None, "a number or None")
            rate = self.rate if sampling_rate is None else sampling_rate
            check_rate(rate, "the audio")
            given = _check_samples(audio)
            check_duration(len(given) / rate, self.longest, "the audio")
            resampler = Resampler(rate, self.rate)
            resampler.feed(given)
            samples = resampler.finish("the audio")
        # The resampler rounds up: a whole window must not grow.
        return samples[: self.max_samples]


def _check_samples(audio: Tensor | NDArray[Any]) -> NDArray[np.float32]:
    array: Any = audio
    if isinstance(audio, Tensor) and audio.is_floating_point():
        check_dense("audio", audio)
        array = audio.detach().cpu().float().numpy()
    if not isinstance(array, np.ndarray) or not np.issubdtype(array.dtype, np.floating):
        kind = getattr(array, "dtype", type(array).__name__)
        raise ValueError(
            "audio must be a file of sound, or mono samples as a floating-point tensor or array in "
            f"-1 to 1, got {kind}"
        )
    if array.ndim != 1:
        raise ValueError(f"audio samples must be mono, (num_samples,), got shape {array.shape}")
    if not array.size:
        raise ValueError("the audio is empty: it holds no samples")
    if not np.isfinite(array).all():
        raise ValueError("the audio holds NaN or infinite samples")
    loudest = float(np.abs(array).max())
    if loudest > _MAX_SAMPLE:
        raise ValueError(
            f"the audio holds samples of up to {loudest:g}; floating-point samples lie in -1 to 1: "
            "divide 16-bit integers by 32768"
        )
    return array.astype(np.float32)
