"""Many values of one kind in a few numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np

__all__ = ["Distribution"]

_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Many values in a few numbers, all in the unit of the values.

    Attributes:
        count: how many values there are, at least one.
        mean: of all.
        p50: so that half of them are not above it; between two values it is interpolated
            linearly, as numpy does by default.
        p90: likewise, nine of ten.
        p99: likewise, 99 of 100. Of fewer than 100 values it is close to the largest.
        max: the largest.
    """

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self | None:
        """Sum values up; None if there are none."""
        numbers = np.fromiter(values, dtype=np.float64)
        if not numbers.size:
            return None
        p50, p90, p99 = np.percentile(numbers, _PERCENTILES).tolist()
        return cls(numbers.size, float(numbers.mean()), p50, p90, p99, float(numbers.max()))
