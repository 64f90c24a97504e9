"""Reads sound of any form as the samples that a checkpoint's feature extractor wants."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoFeatureExtractor, WhisperFeatureExtractor

from engine.media.wav_file import check_duration, read_wav

__all__ = ["SampleReader", "load_extractor"]

_LOUDEST = 2.0
"""Above 1 by as much as filters overshoot, and far below integers that were taken as they are."""


@dataclass(frozen=True, slots=True)
class SampleReader:
    """Brings sound to one sampling rate, and refuses what is longer than a window.

    Attributes:
        rate: samples per second that are wanted.
        max_samples: of that rate.
    """

    rate: int
    max_samples: int

    @classmethod
    def of(cls, extractor: WhisperFeatureExtractor) -> SampleReader:
        """What an extractor wants, and most of what it takes in one go."""
        return cls(int(extractor.sampling_rate), int(extractor.n_samples))

    @property
    def longest_s(self) -> float:
        """The window in seconds."""
        return self.max_samples / self.rate

    def read(
        self, audio: str | Path | Tensor | NDArray[Any], sampling_rate: int | None = None
    ) -> NDArray[np.float32]:
        """Read a WAV file, or take mono samples, and resample.

        Args:
            audio: the file, or floating-point samples ``(num_samples,)`` in -1 to 1.
            sampling_rate: samples per second; None means the file's own, or the wanted one.

        Returns:
            ``(num_samples,)`` of the wanted rate.

        Raises:
            ValueError: it is neither, empty, not mono, not finite, longer than the window, not a
                WAV file, or of a sampling rate that cannot be changed here.
        """
        if isinstance(audio, str | Path):
            samples, rate = self._read_file(audio, sampling_rate)
        else:
            samples, rate = self._take(audio, sampling_rate)
        if rate == self.rate:
            return samples
        # Rounded up by the resampler: a whole window must stay one.
        return _resample(samples, rate, self.rate)[: self.max_samples]

    def _read_file(
        self, file: str | Path, sampling_rate: int | None
    ) -> tuple[NDArray[np.float32], int]:
        samples, rate = read_wav(file, longest_s=self.longest_s)
        if sampling_rate not in (None, rate):
            raise ValueError(
                f"audio {str(file)!r} has {rate} samples per second, but the prompt says "
                f"sampling_rate={sampling_rate}; leave it out for files"
            )
        return samples, rate

    def _take(
        self, audio: Tensor | NDArray[Any], sampling_rate: int | None
    ) -> tuple[NDArray[np.float32], int]:
        rate = self.rate if sampling_rate is None else sampling_rate
        if rate < 1:
            raise ValueError(f"sampling_rate must be at least 1, got {rate}")
        samples = _check_samples(audio)
        check_duration(len(samples) / rate, self.longest_s, "the audio")
        return samples, rate


def load_extractor(path: Path) -> WhisperFeatureExtractor:
    """Load the feature extractor of a checkpoint folder.

    Raises:
        ValueError: it brings none, or one of another kind.
    """
    try:
        extractor = AutoFeatureExtractor.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"the feature extractor in {path} cannot be loaded: {error}") from error
    if not isinstance(extractor, WhisperFeatureExtractor):
        raise ValueError(
            f"the feature extractor in {path} must be a WhisperFeatureExtractor, "
            f"got {type(extractor).__name__}"
        )
    return extractor


def _check_samples(audio: Tensor | NDArray[Any]) -> NDArray[np.float32]:
    array: Any = audio
    if isinstance(audio, Tensor) and audio.is_floating_point():
        array = audio.detach().cpu().float().numpy()
    if not isinstance(array, np.ndarray) or not np.issubdtype(array.dtype, np.floating):
        kind = getattr(array, "dtype", type(array).__name__)
        raise ValueError(
            "audio must be a WAV file, or mono samples as a floating-point tensor or array in "
            f"-1 to 1, got {kind}"
        )
    if array.ndim != 1:
        raise ValueError(f"audio samples must be mono, (num_samples,), got shape {array.shape}")
    if not array.size:
        raise ValueError("the audio is empty: it holds no samples")
    if not np.isfinite(array).all():
        raise ValueError("the audio holds NaN or infinite samples")
    loudest = float(np.abs(array).max())
    if loudest > _LOUDEST:
        raise ValueError(
            f"the audio holds samples of up to {loudest:g}; floating-point samples lie in -1 to 1: "
            "divide 16-bit integers by 32768"
        )
    return array.astype(np.float32)


def _resample(samples: NDArray[np.float32], rate: int, wanted: int) -> NDArray[np.float32]:
    """Change the sampling rate by a polyphase filter (scipy's, with its default window)."""
    try:
        signal = importlib.import_module("scipy.signal")
    except ImportError as error:
        raise ValueError(
            f"the audio has {rate} samples per second and the model wants {wanted}: resample it, "
            "or install scipy to have it done here"
        ) from error
    common = int(np.gcd(rate, wanted))
    resampled = signal.resample_poly(samples, wanted // common, rate // common)
    return np.asarray(resampled, dtype=np.float32)
