"""The extractor's log-mel frames, before and after it cuts them at 80 dB below the loudest."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor
from transformers import WhisperFeatureExtractor

from training.spoken_sums.sizes import AUDIO_TOWER

SAMPLE_RATE = 16_000


@cache
def feature_extractor() -> WhisperFeatureExtractor:
    """What makes the audio tower's input, in training and in use."""
    return WhisperFeatureExtractor(feature_size=AUDIO_TOWER["num_mel_bins"], chunk_length=30)


@cache
def _filters() -> tuple[Tensor, Tensor]:
    extractor = feature_extractor()
    filters = torch.from_numpy(np.asarray(extractor.mel_filters, dtype=np.float32))
    return filters.T.contiguous(), torch.hann_window(extractor.n_fft)


def mel_powers(samples: Tensor) -> Tensor:
    """Decadic logarithms of the mel bands' powers, ``(bands, frames of 10 ms)``, cut nowhere.

    Args:
        samples: 16 kHz, from -1 to 1.
    """
    filters, window = _filters()
    extractor = feature_extractor()
    spectrum = torch.stft(
        samples, extractor.n_fft, extractor.hop_length, window=window, return_complex=True
    )
    return (filters @ spectrum[:, :-1].abs().square()).clamp(min=1e-10).log10()


def normalise(log_powers: Tensor) -> Tensor:
    """What the extractor makes of them, ``(..., bands, frames)``: cut 80 dB below the loudest.

    How loud the loudest is stays: the same sound, ten times fainter, lies lower by a half.
    """
    loudest = log_powers.amax(dim=(-2, -1), keepdim=True)
    return (torch.maximum(log_powers, loudest - 8.0) + 4.0) / 4.0
