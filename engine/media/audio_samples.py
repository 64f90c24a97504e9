"""Reads sound of any form as the samples that a checkpoint's feature extractor wants."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoFeatureExtractor

from engine.interface.arguments import check_argument, check_dense
from engine.interface.config import MediaLimits
from engine.media.media_source import MediaSource
from engine.media.sound_file import LongestSound, Resampler, check_duration, check_rate, read_sound

__all__ = ["SampleReader", "SpectrogramExtractor", "load_extractor"]

_NUMBERS = ("sampling_rate", "n_samples", "hop_length", "n_fft")


class SpectrogramExtractor(Protocol):
    """A feature extractor of transformers that works on windows of a fixed length."""

    sampling_rate: int
    n_samples: int
    hop_length: int
    n_fft: int

    def __call__(self, raw_speech: Any, *, sampling_rate: int, **options: Any) -> Any:
        """Samples to ``input_features``, ``(1, mel bins, frames)``, by their names."""


def load_extractor(path: Path, *, trust_remote_code: bool = False) -> SpectrogramExtractor:
    """Load the feature extractor of a checkpoint folder.

    Args:
        trust_remote_code: whether it may come with its own Python code; no prompt asks the user.

    Raises:
        ValueError: it brings none, one that makes no spectrograms of windows, or one that cannot
            be made or needs code of its own.
    """
    try:
        extractor: Any = AutoFeatureExtractor.from_pretrained(
            path, trust_remote_code=trust_remote_code, local_files_only=not trust_remote_code
        )
    # Values of a wrong kind make transformers raise whatever it stumbles over.
    except Exception as error:
        raise ValueError(f"the feature extractor in {path} cannot be loaded: {error}") from error
    for name in _NUMBERS:
        number = getattr(extractor, name, None)
        if not isinstance(number, int) or number < 1:
            raise ValueError(
                f"the feature extractor in {path}, a {type(extractor).__name__}, must make "
                f"spectrograms of windows of a fixed length, but its {name} is {number!r}"
            )
    loaded: SpectrogramExtractor = extractor
    return loaded


_LOUDEST = 2.0
"""Above 1 by as much as filters overshoot, and far below integers that were taken as they are."""


@dataclass(frozen=True, slots=True)
class SampleReader:
    """Brings sound to one sampling rate, and refuses what is longer than a window.

    Attributes:
        rate: samples per second that are wanted.
        max_samples: of that rate; None takes as many as the limits allow.
    """

    rate: int
    max_samples: int | None
    limits: MediaLimits = field(default_factory=MediaLimits)

    @classmethod
    def of(cls, extractor: SpectrogramExtractor, limits: MediaLimits | None = None) -> SampleReader:
        """What an extractor wants, and most of what it takes in one go."""
        rate, window = int(extractor.sampling_rate), int(extractor.n_samples)
        return cls(rate, window, limits or MediaLimits())

    def of_any_length(self) -> SampleReader:
        """One that takes as much as the user's limit allows."""
        return replace(self, max_samples=None)

    @property
    def longest(self) -> LongestSound:
        """What the window takes, or the user's limit if that is less."""
        if self.max_samples is not None and self.max_samples <= self.limits.max_audio_s * self.rate:
            return LongestSound(self.max_samples / self.rate)
        return LongestSound(self.limits.max_audio_s, "engine.media_limits.max_audio_s")

    def read(
        self, audio: str | Path | bytes | Tensor | NDArray[Any], sampling_rate: int | None = None
    ) -> NDArray[np.float32]:
        """Read a sound, or take mono samples, and resample.

        Args:
            audio: a file, what is in one, or a data URL, of WAV, FLAC, OGG or MP3; or
                floating-point samples ``(num_samples,)`` in -1 to 1.
            sampling_rate: samples per second; None means the file's own, or the wanted one.

        Returns:
            ``(num_samples,)`` of the wanted rate.

        Raises:
            ValueError: it is neither, empty, not mono, not finite, longer than the window, cannot
                be read, or has a sampling rate that no sound has.
        """
        if isinstance(audio, str | Path | bytes):
            samples = self._read_file(audio, sampling_rate)
        else:
            samples = self._take(audio, sampling_rate)
        # Rounded up by the resampler: a whole window must stay one.
        return samples[: self.max_samples]

    def _read_file(
        self, file: str | Path | bytes, sampling_rate: int | None
    ) -> NDArray[np.float32]:
        source = MediaSource(file, "audio", self.limits.max_file_bytes)
        samples, rate = read_sound(source, longest=self.longest, rate=self.rate)
        if sampling_rate not in (None, rate):
            raise ValueError(
                f"{source.name} has {rate} samples per second, but the prompt says "
                f"sampling_rate={sampling_rate}; leave it out for files"
            )
        return samples

    def _take(self, audio: Tensor | NDArray[Any], sampling_rate: int | None) -> NDArray[np.float32]:
        check_argument("sampling_rate", sampling_rate, Real | None, "a number or None")
        rate = self.rate if sampling_rate is None else sampling_rate
        check_rate(rate, "the audio")
        samples = _check_samples(audio)
        check_duration(len(samples) / rate, self.longest, "the audio")
        resampler = Resampler(rate, self.rate)
        resampler.feed(samples)
        return resampler.finish("the audio")


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
    if loudest > _LOUDEST:
        raise ValueError(
            f"the audio holds samples of up to {loudest:g}; floating-point samples lie in -1 to 1: "
            "divide 16-bit integers by 32768"
        )
    return array.astype(np.float32)
