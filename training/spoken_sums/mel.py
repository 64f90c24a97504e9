"""The spectrogram between the flow and the waveform network."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from training.spoken_sums.answers import SAMPLING_RATE

HOP = 240
"""Samples per frame: two frames are a code, 480 samples, as in the published model."""

NUM_BANDS = 80
FRAMES_PER_SECOND = SAMPLING_RATE // HOP

# transformers' BigVGAN clips its input here (above at 20 dB), so nothing beyond is learnt.
MEL_MIN, MEL_MAX = -3.0, 2.3

_FFT = 1024
_TOP = 8000.0  # flite speaks at 16 kHz
_FLOOR = 1e-5
_SHIFT, _SCALE = 6.5, 2.0
SILENCE = MEL_MIN
"""The value of every band in a silent frame (nearly: the logarithm's floor is -2.51)."""


def mel_of(samples: Tensor) -> Tensor:
    """Compute the log-mel amplitudes of sound.

    Args:
        samples: ``(..., n)`` float32 in -1 to 1 at 24 kHz, n a multiple of 240.

    Returns:
        ``(..., n / 240, 80)`` float32, with mean -0.64 and deviation 1.17 on flite's speech.
    """
    lead = samples.shape[:-1]
    flat = samples.reshape(-1, samples.shape[-1])
    edge = (_FFT - HOP) // 2
    padded = torch.nn.functional.pad(flat, (edge, edge), mode="reflect")
    window = torch.hann_window(_FFT, device=flat.device)
    waves = torch.stft(padded, _FFT, HOP, window=window, center=False, return_complex=True)
    bands = _filters().to(flat.device) @ (waves.abs() / (_FFT / 2))
    mel = (bands.clamp_min(_FLOOR).log() + _SHIFT) / _SCALE
    return mel.clamp(MEL_MIN, MEL_MAX).transpose(1, 2).reshape(*lead, -1, NUM_BANDS)


@cache
def _filters() -> Tensor:
    """Return triangular filters on the mel scale, ``(80, 513)``."""
    top = 2595 * torch.log10(torch.tensor(1 + _TOP / 700))
    corners = 700 * (10 ** (torch.linspace(0, float(top), NUM_BANDS + 2) / 2595) - 1)
    bins = torch.arange(_FFT // 2 + 1) * SAMPLING_RATE / _FFT
    left = [(bins - low) / (high - low) for low, high in pairwise(corners)]
    rows = [torch.minimum(up, 1 - down).clamp_min(0) for up, down in pairwise(left)]
    return torch.stack(rows)
