"""Relative cost of one way over another, from rounds of both."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

_RESAMPLED = 2000


class Ratios:
    """Rounds' ratios of one way to another, printed as additional percent.

    Printed are their median, and the range that contains 90 % of the medians of resampled rounds
    (bootstrap).
    """

    def __init__(self, ratios: Sequence[float]) -> None:
        self._costs = sorted(100 * (ratio - 1) for ratio in ratios)

    def __str__(self) -> str:
        chance = random.Random(0)
        medians = sorted(
            statistics.median(chance.choices(self._costs, k=len(self._costs)))
            for _ in range(_RESAMPLED)
        )
        low, high = medians[_RESAMPLED // 20], medians[-1 - _RESAMPLED // 20]
        return (
            f"{statistics.median(self._costs):.1f} % (nine in ten of the medians of rounds drawn "
            f"anew: {low:.1f} to {high:.1f}; rounds: {self._costs[0]:.1f} to {self._costs[-1]:.1f})"
        )
