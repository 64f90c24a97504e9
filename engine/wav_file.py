"""Reads WAV files as mono samples."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["check_duration", "read_wav"]

_STREAM_BYTES = 2**31 - 2**16
"""What no honest header states: writers of streams put about 2**31 or 2**32 bytes there."""


def read_wav(path: str | Path, *, longest_s: float) -> tuple[NDArray[np.float32], int]:
    """Read a WAV file of PCM samples, 8 to 32 bits each; channels are averaged.

    Args:
        path: the file.
        longest_s: longest duration in seconds. A longer file is refused before it is read.

    Returns:
        Mono samples ``(num_samples,)`` in -1 to 1, and how many of them make a second.

    Raises:
        ValueError: the file cannot be read, is no WAV file, is cut off by more than a sample, or
            holds samples of another kind, none at all, or too many.
    """
    name = f"audio {str(path)!r}"
    try:
        with wave.open(str(path), "rb") as file:
            rate, channels, width = file.getframerate(), file.getnchannels(), file.getsampwidth()
            # A file that was written as a stream does not know its length: its header says 2**32,
            # or that less the header.
            most = Path(path).stat().st_size // (channels * width)
            stated = file.getnframes()
            num_frames = min(stated, most)
            if rate < 1:
                raise ValueError(f"{name} says that it has {rate} samples per second")
            check_duration(num_frames / rate, longest_s, name)
            data = file.readframes(num_frames)
            found = len(data) // (channels * width)
            if found + 1 < stated < _STREAM_BYTES // (channels * width):
                raise ValueError(
                    f"{name} is cut off: its header states {stated} samples, it holds {found}"
                )
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror or error}") from error
    except (wave.Error, EOFError) as error:
        reason = str(error) or "it ends too early"
        raise ValueError(
            f"{name} is not a WAV file of PCM samples: {reason}; convert it to 16-bit PCM"
        ) from error
    data = data[: len(data) // (channels * width) * (channels * width)]
    if not data:
        raise ValueError(f"{name} is empty: it holds no samples")
    samples = _to_float(data, width).reshape(-1, channels).mean(axis=1, dtype=np.float64)
    return samples.astype(np.float32), rate


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


def _to_float(data: bytes, width: int) -> NDArray[Any]:
    """Integers of ``width`` bytes to -1 to 1. Only those of one byte are unsigned."""
    if width == 1:
        return (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    if width == 3:
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        return wide.view("<i4").reshape(-1) / 2.0**31
    return np.frombuffer(data, f"<i{width}") / 2.0 ** (8 * width - 1)
