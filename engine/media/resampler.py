"""Changes the sampling rate of a sound that comes in pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Resampler"]


class Resampler:
    """Takes mono samples of one rate, and gives those of another; however they are cut.

    Args:
        rate: samples per second that come.
        wanted: samples per second that are given.
    """

    def __init__(self, rate: int, wanted: int) -> None:
        self._rates = rate, wanted
        self._stream: Any = None
        self._num_fed = 0
        self._parts: list[NDArray[np.float32]] = []
        if rate != wanted:
            import soxr  # only where there is something to do for it

            self._stream = soxr.ResampleStream(rate, wanted, 1, dtype="float32")

    def feed(self, samples: NDArray[np.float32]) -> None:
        """Take the next samples, ``(n,)``, and keep what they give until the end."""
        self._num_fed += len(samples)
        self._parts.append(self.resampled(samples))

    def finish(self, name: str) -> NDArray[np.float32]:
        """Give all of them, ``(n * wanted / rate,)``, rounded.

        Args:
            name: of the sound, for the message.

        Raises:
            ValueError: so few came that none are left.
        """
        self._parts.append(self.rest())
        samples = np.concatenate(self._parts)
        if not len(samples):
            rate, wanted = self._rates
            raise ValueError(
                f"{name} is too short: {self._num_fed} samples of {rate} per second are none of "
                f"{wanted}"
            )
        return samples

    def resampled(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Take the next samples, ``(n,)``, and give what they make certain; perhaps nothing."""
        return self._through(samples, last=False)

    def rest(self) -> NDArray[np.float32]:
        """Give what was held back until nothing more comes."""
        return self._through(np.zeros(0, np.float32), last=True)

    def _through(self, samples: NDArray[np.float32], *, last: bool) -> NDArray[np.float32]:
        if self._stream is None:
            return samples
        given: NDArray[np.float32] = self._stream.resample_chunk(samples, last=last)
        return given
