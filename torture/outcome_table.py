"""The table that every script of ``torture/`` prints a row of: what was done, what became of it."""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

OUTCOMES = ("went on", "failed alone", "said broken", "wrong", "silently broken", "hangs")
"""What can become of a fault or an input. ``went on``: all was as if nothing had happened;
``failed alone``: who was meant, or was being taken in, failed with a message, and nobody else;
``said broken``: it refuses to go on, and says so. The last three must not be."""

_BAD = frozenset({"wrong", "silently broken", "hangs"})
HEADER = (
    f"| what was injected | how many | {' | '.join(OUTCOMES)} | peak memory |\n"
    f"|---|{'---:|' * (len(OUTCOMES) + 2)}"
)


@dataclass
class Tally:
    """Counts outcomes of one kind of fault or input, and keeps what must not be.

    Attributes:
        what: what was injected, for the first column.
        counts: how often each outcome was seen.
        failures: what was seen where it must not be.
        peak_mb: largest resident size of the processes that took them; None means this one's.
    """

    what: str
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    peak_mb: float | None = None

    def add(self, outcome: str, detail: str = "") -> None:
        """Count one.

        Raises:
            ValueError: there is no such outcome.
        """
        if outcome not in OUTCOMES:
            raise ValueError(f"outcome {outcome!r}; expected one of {', '.join(OUTCOMES)}")
        self.counts[outcome] += 1
        if outcome in _BAD:
            self.failures.append(f"{outcome}: {detail}")

    def row(self) -> str:
        """The row of the table; this process's peak is that so far."""
        peak_mb = _peak_memory_mb() if self.peak_mb is None else self.peak_mb
        numbers = [f"{self.counts[name]:,}" for name in OUTCOMES]
        cells = [self.what, f"{self.counts.total():,}", *numbers, f"{peak_mb:,.0f} MB"]
        return f"| {' | '.join(cells)} |"

    @staticmethod
    def report(tallies: Iterable[Tally]) -> int:
        """Print the table, and below it what must not be; returns an exit status, 0 if nothing."""
        tallies = list(tallies)
        print(HEADER)
        for tally in tallies:
            print(tally.row())
        failures = [f"{tally.what}: {each}" for tally in tallies for each in tally.failures]
        for failure in failures:
            print(failure, file=sys.stderr)
        return int(bool(failures))


def _peak_memory_mb() -> float:
    """The largest resident size that this process has had, in megabytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3
