"""Speech for audio encoders, through the checkpoint's feature extractor."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoFeatureExtractor, WhisperFeatureExtractor

from engine.encoder_input import EncoderInput
from engine.encoder_input_maker import EncoderInputMaker, EncoderSide
from engine.prompts import AudioPrompt, EncoderPrompt
from engine.wav_file import check_duration, read_wav

__all__ = ["AudioEncoderInputs"]


class AudioEncoderInputs(EncoderInputMaker):
    """Turns speech into the log-mel features of a fixed window.

    ::

        WAV ─► mono samples ─► the extractor's rate ─► silence up to the window ─► log-mel

    Args:
        encoder: of the model.
        extractor: of the checkpoint.
    """

    takes = "audio (a WAV file or samples)"

    def __init__(self, encoder: EncoderSide, extractor: WhisperFeatureExtractor) -> None:
        super().__init__(encoder)
        self._extractor = extractor

    @classmethod
    def from_checkpoint(cls, path: Path, encoder: EncoderSide) -> AudioEncoderInputs:
        """Load the feature extractor of a checkpoint folder.

        Raises:
            ValueError: it brings none, or one of another kind.
        """
        try:
            extractor = AutoFeatureExtractor.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"the feature extractor in {path} cannot be loaded: {error}"
            ) from error
        if not isinstance(extractor, WhisperFeatureExtractor):
            raise ValueError(
                f"the feature extractor in {path} must be a WhisperFeatureExtractor, "
                f"got {type(extractor).__name__}"
            )
        return cls(encoder, extractor)

    @property
    def longest_s(self) -> float:
        """The window in seconds: longer speech is refused."""
        return float(self._extractor.n_samples / self._extractor.sampling_rate)

    def make(self, prompt: EncoderPrompt | None, *, cache_salt: str | None) -> EncoderInput:
        """Read, resample and extract.

        Raises:
            ValueError: the prompt is no audio, empty, not mono, longer than the window, not a
                WAV file, or of a sampling rate that cannot be changed here.
        """
        if not isinstance(prompt, AudioPrompt):
            raise self._refuse(prompt)
        wanted = int(self._extractor.sampling_rate)
        samples, rate = self._samples(prompt)
        if rate != wanted:
            # Rounded up by the resampler: a whole window must stay one.
            samples = _resample(samples, rate, wanted)[: self._extractor.n_samples]
        features = self._extractor(samples, sampling_rate=wanted, return_tensors="pt")
        return self._of_features({"input_features": features["input_features"][0]}, cache_salt)

    def _samples(self, prompt: AudioPrompt) -> tuple[NDArray[np.float32], int]:
        if isinstance(prompt.audio, str | Path):
            samples, rate = read_wav(prompt.audio, longest_s=self.longest_s)
            if prompt.sampling_rate not in (None, rate):
                raise ValueError(
                    f"audio {str(prompt.audio)!r} has {rate} samples per second, but the prompt "
                    f"says sampling_rate={prompt.sampling_rate}; leave it out for files"
                )
            return samples, rate
        rate = (
            self._extractor.sampling_rate if prompt.sampling_rate is None else prompt.sampling_rate
        )
        if rate < 1:
            raise ValueError(f"sampling_rate must be at least 1, got {rate}")
        samples = _check_samples(prompt.audio)
        check_duration(len(samples) / rate, self.longest_s, "the audio")
        return samples, rate


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
