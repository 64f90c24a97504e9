"""Reads WAV files as mono samples, and writes them.

A WAV file is a row of chunks. Each has a name, its size in bytes, its content, and one byte more if
the size is odd, so that the next one begins at an even place::

    RIFF size WAVE                                      the file
      fmt  size  kind channels rate bytes/s align bits  of which sort the samples are
                 [length valid speakers subformat]      only if kind is EXTENSIBLE
      LIST size  ...                                    also fact, JUNK and others: passed over
      data size  first sample of every channel, second of every channel, ...

All numbers are little-endian. Nothing after the samples is looked at.
"""

from __future__ import annotations

import os
import struct
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from engine.interface.waveform import Waveform

__all__ = ["check_duration", "read_wav", "write_wav"]

_LOUDEST = 2**15 - 1
"""Of the 16-bit samples that are written."""

_STREAM_BYTES = 2**31 - 2**16
"""What no honest header states: writers of streams put about 2**31 or 2**32 bytes there."""

_MOST_CHUNKS = 1000
"""Before the samples. A large file of zeros would otherwise be a very long row of empty chunks."""

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
# The better known of the kinds that are refused.
_COMPRESSED = {2: "ADPCM", 6: "A-law", 7: "mu-law", 17: "IMA ADPCM", 49: "GSM", 85: "MP3"}

_FORMAT = struct.Struct("<HHIIHH")
_EXTENSION = struct.Struct("<HHII12s")
_KIND_SUFFIX = bytes.fromhex("0000 1000 8000 00aa00389b71")
"""How a subformat ends that is one of the plain kinds; the kind itself stands before it."""


class _NotPcmError(Exception):
    """Why a file is refused, without its name; all that read headers raise it."""


@dataclass(frozen=True, slots=True)
class _Format:
    """What a file says about its samples.

    Attributes:
        kind: ``_PCM`` or ``_FLOAT``.
        channels: how many; at least 1.
        rate: samples per second of each channel.
        width: bytes of one sample of one channel.
    """

    kind: int
    channels: int
    rate: int
    width: int

    @property
    def frame_bytes(self) -> int:
        """What one sample of all channels takes."""
        return self.channels * self.width


def read_wav(path: str | Path, *, longest_s: float) -> tuple[NDArray[np.float32], int]:
    """Read a WAV file of 8 to 32-bit PCM samples or 32 or 64-bit floats; channels are averaged.

    Args:
        path: the file.
        longest_s: longest duration in seconds. A longer file is refused before it is read.

    Returns:
        Mono samples ``(num_samples,)`` in -1 to 1 (floats beyond stay), and how many make a second.

    Raises:
        ValueError: the file cannot be read, is no WAV file, is cut off by more than a sample, or
            holds samples of another kind, NaN or infinity, none at all, or too many.
    """
    name = f"audio {str(path)!r}"
    try:
        with open(path, "rb") as file:
            form, stated = _find_samples(file)
            data = _read_samples(file, form, stated, longest_s, name)
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror or error}") from error
    except _NotPcmError as error:
        raise ValueError(
            f"{name} is not a WAV file of PCM samples: {error}; convert it to 16-bit PCM"
        ) from error
    if not data:
        raise ValueError(f"{name} is empty: it holds no samples")
    # A sum may overflow, and so may a wide float that becomes a narrow one: both end as infinity.
    with np.errstate(all="ignore"):
        frames = _to_float(data, form).reshape(-1, form.channels)
        samples = frames.mean(axis=1, dtype=np.float64).astype(np.float32)
    if not np.isfinite(samples).all():
        raise ValueError(f"{name} holds samples that are NaN, infinite or too large for float32")
    return samples, form.rate


def check_duration(seconds: float, longest_s: float, name: str) -> None:
    """Refuse what is longer than the model's window.

    Raises:
        ValueError: says how long it is and how long it may be.
    """
    if seconds > longest_s:
        raise ValueError(
            f"{name} is {seconds:.2f} s long, but the model takes {longest_s:g} s at most: "
            "cut it into shorter pieces"
        )


def _read_samples(
    file: BinaryIO, form: _Format, stated: int | None, longest_s: float, name: str
) -> bytes:
    """Read from where the file stands as many whole frames as it states, or holds if it does not.

    ``ValueError`` if they are too many, or fewer than stated by more than one.
    """
    if form.rate < 1:
        raise ValueError(f"{name} says that it has {form.rate} samples per second")
    held = os.fstat(file.fileno()).st_size - file.tell()
    num_frames = max(0, held if stated is None else min(stated, held)) // form.frame_bytes
    check_duration(num_frames / form.rate, longest_s, name)
    data = file.read(num_frames * form.frame_bytes)
    found = len(data) // form.frame_bytes
    if stated is not None and found + 1 < stated // form.frame_bytes:
        raise ValueError(
            f"{name} is cut off: its header states {stated // form.frame_bytes} samples, "
            f"it holds {found}"
        )
    # The file may have become shorter while it was read.
    return data[: found * form.frame_bytes]


def _find_samples(file: BinaryIO) -> tuple[_Format, int | None]:
    """Move to the first sample.

    Returns:
        What the samples are, and how many bytes of them the header states. None stands for a file
        that was written as a stream, whose header does not know.

    """
    head = file.read(12)
    if len(head) < 12:
        raise _NotPcmError("it ends too early")
    if head[:4] != b"RIFF" or head[8:] != b"WAVE":
        raise _NotPcmError("it does not begin as one")
    form = None
    for name, size in _chunks(file):
        if name == b"fmt ":
            form = _parse_format(file.read(min(size, _FORMAT.size + _EXTENSION.size)))
        elif name == b"data":
            if form is None:
                raise _NotPcmError("its samples come before their format")
            known = _is_known(size, int.from_bytes(head[4:8], "little"), file.tell())
            return form, size if known else None
    raise _NotPcmError("it ends before its samples")


def _is_known(size: int, riff_size: int, begin: int) -> bool:
    """Whether the size of the samples, which begin at a place, was written when it was known.

    A writer that cannot go back leaves a huge number or 0. But 0 is also what an empty file says,
    and other chunks may follow there: then the size of the whole file counts them.
    """
    counts_more = begin < 8 + riff_size and riff_size < _STREAM_BYTES
    return size < _STREAM_BYTES and (size > 0 or counts_more)


def _chunks(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Names and stated sizes of the chunks, with the file at the content of each."""
    begin = file.tell()
    for _ in range(_MOST_CHUNKS):
        file.seek(begin)
        head = file.read(8)
        if len(head) < 8:
            return
        size = int.from_bytes(head[4:], "little")
        yield head[:4], size
        begin += 8 + size + size % 2
    raise _NotPcmError(f"none of its first {_MOST_CHUNKS} chunks holds samples")


def _parse_format(chunk: bytes) -> _Format:
    """Read the content of a ``fmt`` chunk, if it is whole and tells of samples that can be read."""
    if len(chunk) < _FORMAT.size:
        raise _NotPcmError("its format ends too early")
    kind, channels, rate, _, align, bits = _FORMAT.unpack_from(chunk)
    width = (bits + 7) // 8
    if kind == _EXTENSIBLE:
        kind = _parse_extension(chunk[_FORMAT.size :], 8 * width)
    if kind not in (_PCM, _FLOAT):
        known = f" ({_COMPRESSED[kind]})" if kind in _COMPRESSED else ""
        raise _NotPcmError(f"its samples are of kind {kind}{known}")
    if not channels:
        raise _NotPcmError("it has no channels")
    if bits not in ((32, 64) if kind == _FLOAT else range(1, 33)):
        what = "floats" if kind == _FLOAT else "integers"
        raise _NotPcmError(f"its samples are {what} of {bits} bits")
    if align != channels * width:
        raise _NotPcmError(f"it states {align} bytes for {channels} channels of {width}")
    return _Format(kind, channels, rate, width)


def _parse_extension(extension: bytes, bits: int) -> int:
    """The kind that an extensible header tells of, for samples that take a number of bits.

    Fewer of the bits may be valid. They are the upper ones, so that the value needs no change.
    """
    if len(extension) < _EXTENSION.size:
        raise _NotPcmError("its format ends too early")
    _, valid, _, kind, suffix = _EXTENSION.unpack(extension)
    if suffix != _KIND_SUFFIX:
        raise _NotPcmError(f"its samples are of kind {extension[8:].hex()}")
    if valid > bits:
        raise _NotPcmError(f"it states {valid} valid bits of {bits}")
    return int(kind)


def _to_float(data: bytes, form: _Format) -> NDArray[Any]:
    """Integers to -1 to 1; floats as they are. Only integers of one byte are unsigned."""
    if form.kind == _FLOAT:
        return np.frombuffer(data, f"<f{form.width}")
    if form.width == 1:
        return (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    if form.width == 3:
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        return wide.view("<i4").reshape(-1) / 2.0**31
    return np.frombuffer(data, f"<i{form.width}") / 2.0 ** (8 * form.width - 1)


def write_wav(path: str | Path, waveform: Waveform) -> None:
    """Write mono samples as 16-bit PCM, rounded; what is beyond -1 to 1 is clipped, not wrapped.

    Args:
        path: of the file; one that exists is replaced.
        waveform: what to write; it may be empty.

    Raises:
        ValueError: the samples are not ``(num_samples,)`` finite floating point numbers.
    """
    samples = waveform.samples
    if samples.ndim != 1 or not samples.is_floating_point() or not samples.isfinite().all():
        raise ValueError(
            "a waveform must be (num_samples,) finite floating point numbers, "
            f"got {tuple(samples.shape)} {samples.dtype}"
        )
    scaled = (samples.detach().cpu().to(torch.float32).clamp(-1.0, 1.0) * _LOUDEST).round()
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(waveform.sampling_rate)
        # WAV is little-endian, whatever the machine is.
        file.writeframes(scaled.to(torch.int16).numpy().astype("<i2").tobytes())
