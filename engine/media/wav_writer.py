"""Writes waveforms as WAV files."""

from __future__ import annotations

import wave
from pathlib import Path

import torch

from engine.media.waveform import Waveform

__all__ = ["write_wav"]

_LOUDEST = 2**15 - 1


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
