"""How much load there is at once: so many requests in flight, or so many a second."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["LoadLevel", "parse_levels"]

_MOST_AT_ONCE = 65_536
_FASTEST_PER_S = 1_000_000.0


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """One amount of load; exactly one of the two is set.

    Attributes:
        concurrency: a closed loop: so many clients, each of which sends its next request when the
            one before has ended.
        rate: an open loop: so many arrivals a second in the mean, by a Poisson process, however
            slow the answers are.
    """

    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("a level is either a concurrency or a rate")
        if self.concurrency is not None and not 1 <= self.concurrency <= _MOST_AT_ONCE:
            raise ValueError(
                f"concurrency must be from 1 to {_MOST_AT_ONCE}, got {self.concurrency}"
            )
        if self.rate is not None and not 0.0 < self.rate <= _FASTEST_PER_S:
            raise ValueError(
                f"rate must be above 0 and at most {_FASTEST_PER_S:g} requests a second, got "
                f"{self.rate:g}"
            )

    @property
    def label(self) -> str:
        """What people read."""
        return f"{self.concurrency}" if self.concurrency is not None else f"{self.rate:g}/s"


def parse_levels(concurrency: str | None, rate: str | None) -> tuple[LoadLevel, ...]:
    """Read ``1,2,4`` of one of two flags; without either, one request at a time.

    Raises:
        ValueError: both are given, or one is wrong; names the flag.
    """
    if concurrency is not None and rate is not None:
        raise ValueError("--concurrency waits for answers and --rate does not: give one of them")
    if rate is not None:
        return tuple(LoadLevel(rate=each) for each in _numbers("--rate", rate))
    levels = []
    for number in _numbers("--concurrency", "1" if concurrency is None else concurrency):
        if number != math.floor(number):
            raise ValueError(f"--concurrency: must be whole numbers, got {number:g}")
        try:
            levels.append(LoadLevel(concurrency=int(number)))
        except ValueError as error:
            raise ValueError(f"--concurrency: {error}") from None
    return tuple(levels)


def _numbers(flag: str, text: str) -> list[float]:
    numbers = []
    for part in text.split(","):
        try:
            number = float(part)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number <= 0:
            raise ValueError(f"{flag}: must be numbers above 0, such as 1,2,4; got {text!r:.80}")
        numbers.append(number)
    if flag == "--rate" and max(numbers) > _FASTEST_PER_S:
        raise ValueError(f"{flag}: at most {_FASTEST_PER_S:g} requests a second, got {text!r:.80}")
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"{flag}: a number stands twice in {text!r:.80}")
    return numbers
