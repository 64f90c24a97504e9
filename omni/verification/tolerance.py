"""How far two outputs may be apart and still be equal, by measured rounding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

__all__ = ["WAVEFORM", "Spread", "Tolerance"]

WAVEFORM = "waveform"
"""Name of a stage's sound among the tensors that are compared."""

# Noise is measured on a few requests; others have other rows, and their worst may be worse.
_SAFETY = 4.0


class _Limits(NamedTuple):
    """What is believed of rounding in one element type.

    Attributes:
        tensor: is allowed in tensors whatever was measured.
        tensor_noise: the most that is put down to rounding.
        tie: is allowed between log-probabilities whatever was measured.
        tie_noise: the most of that that is put down to rounding.
    """

    tensor: float
    tensor_noise: float
    tie: float
    tie_noise: float


# Sums over other batch shapes round differently: a few units in the last place of a type's 53, 24,
# 11 or 8 significant bits. A deep model amplifies that, by more than can be told beforehand.
_LIMITS = {
    torch.float64: _Limits(1e-5, 1e-5, 1e-4, 1e-4),
    torch.float32: _Limits(1e-5, 1e-3, 1e-4, 1e-2),
    torch.float16: _Limits(1e-2, 5e-2, 2e-2, 1e-1),
    torch.bfloat16: _Limits(5e-2, 1e-1, 1e-1, 5e-1),
}
_EXACT = _Limits(0.0, 0.0, 0.0, 0.0)

# A sample of a WAV file comes in steps of this: what is nearer is the same sound. Of hundreds of
# answers in one batch, a few were apart by more than 1e-5 where the measured noise was nought.
_SAMPLE_STEP = 2.0**-15


@dataclass(slots=True)
class Spread:
    """How far apart outputs of one stage were at most.

    Attributes:
        tensors: per tensor, the largest difference between elements, as a share of the largest
            element of their row (or of 1, in a row of smaller ones).
        logprobs: the largest difference between log-probabilities of generated tokens.
    """

    tensors: dict[str, float] = field(default_factory=dict)
    logprobs: float = 0.0

    def include(self, other: Spread) -> None:
        """Widen this one to cover the other."""
        for name, apart in other.tensors.items():
            self.tensors[name] = max(self.tensors.get(name, 0.0), apart)
        self.logprobs = max(self.logprobs, other.logprobs)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far the outputs of one stage may be apart and still be equal.

    No constant is right for all models: what rounding does grows with depth and width. So four
    times the *noise* is allowed, which is what batching alone changes in uncached runs, within
    limits of the element type: at least 1e-5 in float32 (1e-2 in float16, 5e-2 in bfloat16), and
    no more than noise of 1e-3 (5e-2, 1e-1) is believed. A waveform may always differ by one step of
    16-bit samples, 2 ** -15. Integers must be equal.

    Attributes:
        atol: replaces all of this for tensors.
        noise: what was measured; empty if nothing was.
        measuring: this is for the run that measures the noise: what is believed is allowed.
    """

    atol: float | None = None
    noise: Spread = field(default_factory=Spread)
    measuring: bool = False

    def tensor(self, name: str, dtype: torch.dtype) -> float:
        """How far elements may be apart, as a share of their row's largest, or of 1 if larger."""
        if self.atol is not None:
            return self.atol
        limits = _LIMITS.get(dtype, _EXACT)
        least = max(limits.tensor, _SAMPLE_STEP) if name == WAVEFORM else limits.tensor
        return self._allowed(self.noise.tensors.get(name, 0.0), least, limits.tensor_noise)

    def tie(self, dtype: torch.dtype | None) -> float:
        """How near two tokens' log-probabilities must be for rounding to decide between them."""
        limits = _LIMITS.get(dtype or torch.float32, _EXACT)
        return self._allowed(self.noise.logprobs, limits.tie, limits.tie_noise)

    def _allowed(self, noise: float, least: float, most_noise: float) -> float:
        return most_noise if self.measuring else max(least, _SAFETY * min(noise, most_noise))
