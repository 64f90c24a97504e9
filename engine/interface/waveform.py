"""Sound, as a vocoder makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Waveform"]


@dataclass(frozen=True, slots=True, eq=False)
class Waveform:
    """Mono samples.

    Attributes:
        samples: ``(num_samples,)`` float32 on the CPU, in -1 to 1.
        sampling_rate: samples per second.
    """

    samples: Tensor
    sampling_rate: int

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return self.samples.shape[0] / self.sampling_rate

    def followed_by(self, other: Waveform) -> Waveform:
        """Play one after the other.

        Raises:
            ValueError: their sampling rates differ.
        """
        import torch  # not when prompts and settings are named

        if other.sampling_rate != self.sampling_rate:
            raise ValueError(
                f"sound of {self.sampling_rate} samples per second cannot be followed by sound "
                f"of {other.sampling_rate}"
            )
        return Waveform(torch.cat([self.samples, other.samples]), self.sampling_rate)
