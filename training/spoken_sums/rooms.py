"""Augmentation of espeak-ng's sounds: rooms, microphones, voices, silence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from training.spoken_sums.log_mel import normalise

LONGEST = 600
"""Maximum frames of a sound: the tower's window."""


@dataclass(frozen=True, slots=True)
class Recording:
    """An augmented recording of a question.

    Attributes:
        features: the tower's input, ``(bands, frames)``.
        begin: frame at which speech begins.
        end: frame at which it has ended.
    """

    features: Tensor
    begin: int
    end: int


def _uniform(low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand(()))


def recorded(powers: Tensor, strength: float = 1.0) -> Recording:
    """Return a random recording of a question.

    Args:
        powers: ``(bands, frames)``, in log10.
        strength: maximum deviation from a quiet room, from 0 to 1.
    """
    bands = powers.shape[0]
    powers = _stretched(powers.float(), strength)
    most = 300 if torch.rand(()) < 0.1 else 45
    before, after = int(_uniform(0, 30)), int(_uniform(0, most))
    room = max(0, LONGEST - powers.shape[1])
    before = min(before, room)
    end = min(LONGEST, before + powers.shape[1])
    powers = functional.pad(powers, (before, min(after, room - before)), value=-10.0)[:, :LONGEST]
    # The microphone's frequency response, and background noise.
    powers = powers + torch.linspace(-1, 1, bands).unsqueeze(1) * _uniform(-0.7, 0.7) * strength
    if torch.rand(()) < 0.7:
        level = float(powers.max()) - _uniform(5.0 - 3.0 * strength, 8.0)
        shape = torch.linspace(1, -1, bands).unsqueeze(1) * _uniform(-0.3, 1.0)
        noise = level + shape + 0.25 * torch.randn_like(powers)
        powers = (10.0**powers + 10.0**noise).log10()
    features = normalise(powers)
    low = float(features.min())
    for _ in range(int(_uniform(0, 1 + 2 * strength))):
        width, start = int(_uniform(1, 9)), int(_uniform(0, bands - 9))
        features[start : start + width] = low
    for _ in range(int(_uniform(0, 1 + 2 * strength))):
        width, start = int(_uniform(1, 6)), int(_uniform(0, max(1, features.shape[1] - 6)))
        features[:, start : start + width] = low
    return Recording(features, before, end)


def _stretched(powers: Tensor, strength: float) -> Tensor:
    """Change the speed by up to a tenth, and the vocal tract length by up to a twelfth."""
    bands, frames = powers.shape
    wide, long = _uniform(-0.08, 0.08) * strength, _uniform(-0.1, 0.1) * strength
    size = (round(bands * (1 + wide)), round(frames * (1 + long)))
    warped = functional.interpolate(powers[None, None], size=size, mode="bilinear")[0, 0]
    if size[0] >= bands:
        return warped[:bands]
    return torch.cat([warped, warped[-1:].expand(bands - size[0], -1)])
