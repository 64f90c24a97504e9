"""The extractor's log-mel frames, before and after clipping at 80 dB below the maximum."""

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
    """Return the extractor of the audio tower's input, in training and inference."""
    return WhisperFeatureExtractor(feature_size=AUDIO_TOWER["num_mel_bins"], chunk_length=30)


@cache
def _filters() -> tuple[Tensor, Tensor]:
    extractor = feature_extractor()
    filters = torch.from_numpy(np.asarray(extractor.mel_filters, dtype=np.float32))
    return filters.T.contiguous(), torch.hann_window(extractor.n_fft)


def mel_powers(samples: Tensor) -> Tensor:
    """Return log10 of the mel bands' powers, ``(bands, frames of 10 ms)``, without clipping.

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
    """Normalize like the extractor, ``(..., bands, frames)``: clip 80 dB below the maximum.

    The level is kept: the same sound at a tenth of the amplitude is lower by a half.
    """
    loudest = log_powers.amax(dim=(-2, -1), keepdim=True)
    return (torch.maximum(log_powers, loudest - 8.0) + 4.0) / 4.0
