"""What the header of a WAV file states, where libsndfile takes it on trust.

libsndfile reads what is left of a file that lost its end, and nothing of one that was written as a
stream and states no samples. So it is looked up here how many bytes of samples there should be.

A WAV file is a row of chunks. Each has a name, its size in bytes, its content, and one byte more if
the size is odd, so that the next one begins at an even place::

    RIFF size WAVE                                      the file
      fmt  size  kind channels rate bytes/s align bits  of which sort the samples are
                 [length valid speakers subformat]      only if kind is EXTENSIBLE
      LIST size  ...                                    also fact, JUNK and others: passed over
      data size  first sample of every channel, second of every channel, ...
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

__all__ = ["WavHeader", "WavHeaderError", "read_wav_header"]

_STREAM_BYTES = 2**31 - 2**16
"""What no honest header states: writers of streams put about 2**31 or 2**32 bytes there."""

_MOST_CHUNKS = 1000
"""Before the samples. A large file of zeros would otherwise be a very long row of empty chunks."""

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_FORMAT = struct.Struct("<HHIIHH")
_EXTENSION = struct.Struct("<HHII12s")
_KIND_SUFFIX = bytes.fromhex("0000 1000 8000 00aa00389b71")
"""How a subformat ends that is one of the plain kinds; the kind itself stands before it."""


class WavHeaderError(ValueError):
    """Why a file is no WAV file, without its name."""


@dataclass(frozen=True, slots=True)
class WavHeader:
    """Where the samples of a file are.

    Attributes:
        begin: place of the first sample.
        num_bytes: of all samples; None in a file that was written as a stream, which cannot know.
        frame_bytes: of one sample of all channels.
        rate: samples per second of each channel.
    """

    begin: int
    num_bytes: int | None
    frame_bytes: int
    rate: int


def read_wav_header(file: BinaryIO) -> WavHeader:
    """Look for the samples of a file that stands at its beginning, and begins with ``RIFF``.

    Raises:
        WavHeaderError: it ends before them, or the format in front of them contradicts itself.
    """
    head = file.read(12)
    if len(head) < 12 or head[8:] != b"WAVE":
        raise WavHeaderError("it does not begin as one")
    frame: tuple[int, int] | None = None
    for name, size in _chunks(file):
        if name == b"fmt ":
            frame = _frame(file.read(min(size, _FORMAT.size + _EXTENSION.size)))
        elif name == b"data":
            if frame is None:
                raise WavHeaderError("its samples come before their format")
            begin = file.tell()
            known = _is_known(size, int.from_bytes(head[4:8], "little"), begin)
            return WavHeader(begin, size if known else None, *frame)
    raise WavHeaderError("it ends before its samples")


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
    raise WavHeaderError(f"none of its first {_MOST_CHUNKS} chunks holds samples")


def _frame(chunk: bytes) -> tuple[int, int]:
    """Bytes of a frame, and frames of a second, by a ``fmt`` chunk.

    What the samples are is libsndfile's to say, as far as it looks.
    """
    if len(chunk) < _FORMAT.size:
        raise WavHeaderError("its format ends too early")
    kind, channels, rate, _, align, bits = _FORMAT.unpack_from(chunk)
    width = (bits + 7) // 8
    if not channels or not width:
        raise WavHeaderError(f"it states {channels} channels of {bits} bits")
    if kind == _EXTENSIBLE:
        kind = _plain_kind(chunk[_FORMAT.size :], 8 * width)
    if kind == _FLOAT and bits not in (32, 64):
        raise WavHeaderError(f"its samples are floats of {bits} bits")
    # Compressed samples come in blocks of a size of their own.
    if width * channels != align and kind in (_PCM, _FLOAT):
        raise WavHeaderError(f"it states {align} bytes for {channels} channels of {width}")
    return int(align) or width * channels, int(rate)


def _plain_kind(extension: bytes, bits: int) -> int:
    """The kind that an extensible header tells of, for samples that take a number of bits."""
    if len(extension) < _EXTENSION.size:
        raise WavHeaderError("its format ends too early")
    _, valid, _, kind, suffix = _EXTENSION.unpack(extension)
    if suffix != _KIND_SUFFIX:
        raise WavHeaderError(f"its samples are of kind {extension[8:].hex()}")
    if valid > bits:
        raise WavHeaderError(f"it states {valid} valid bits of {bits}")
    return int(kind)
