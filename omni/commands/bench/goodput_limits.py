"""What a request must keep to so that it counts as a good one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from engine.interface.suggestion import suggest
from omni.commands.bench.measured_request import PER_REQUEST_METRICS, MeasuredRequest

__all__ = ["GoodputLimits"]


@dataclass(frozen=True, slots=True)
class GoodputLimits:
    """What a request must keep to so that it counts as a good one.

    Attributes:
        limits: the most that each measure may be: seconds, or for ``real_time_factor`` a factor.
    """

    limits: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``first_token=0.5,end_to_end=10``.

        Raises:
            ValueError: a measure or a number is wrong; names the flag.
        """
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, equals, number = (each.strip() for each in part.partition("="))
            if not equals:
                raise ValueError(
                    f"--goodput: must be limits such as first_token=0.5,end_to_end=10; got "
                    f"{text!r:.80}"
                )
            if name not in PER_REQUEST_METRICS:
                raise ValueError(
                    f"--goodput: unknown measure {name!r:.80}{suggest(name, PER_REQUEST_METRICS)}; "
                    f"there are {', '.join(PER_REQUEST_METRICS)}"
                )
            if name in limits:
                raise ValueError(f"--goodput: {name} stands twice")
            try:
                limit = float(number)
            except ValueError:
                limit = math.nan
            if not math.isfinite(limit) or limit < 0:
                raise ValueError(f"--goodput: {name}: must be a number from 0 on, got {number!r}")
            limits[name] = limit
        return cls(limits)

    def are_kept(self, record: MeasuredRequest) -> bool:
        """Whether a request was answered, and within all limits.

        One that gave nothing to measure, such as an answer without sound where there is a limit on
        the first sound, has not kept the limit.
        """
        if record.failure is not None:
            return False
        for name, limit in self.limits.items():
            value = PER_REQUEST_METRICS[name](record)
            if value is None or value > limit:
                return False
        return True
