"""Table of injected faults and their outcomes; every script of ``torture/`` prints rows of it."""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

OUTCOMES = ("went on", "failed alone", "said broken", "wrong", "silently broken", "hangs")
"""Outcomes of a fault or an input. ``went on``: everything behaved as without it; ``failed alone``:
only the affected request or input failed, with a message; ``said broken``: the engine refuses to
continue, with a message. The last three are failures."""

_BAD = frozenset({"wrong", "silently broken", "hangs"})
HEADER = (
    f"| what was injected | how many | {' | '.join(OUTCOMES)} | peak memory |\n"
    f"|---|{'---:|' * (len(OUTCOMES) + 2)}"
)


@dataclass
class Tally:
    """Counts outcomes of one kind of fault or input, and records failures.

    Attributes:
        what: the injected fault, for the first column.
        counts: number of occurrences of each outcome.
        failures: details of the outcomes that are failures.
        peak_mb: peak resident size of the processes that ran them; None means this one's.
    """

    what: str
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    peak_mb: float | None = None

    def add(self, outcome: str, detail: str = "") -> None:
        """Count one outcome.

        Raises:
            ValueError: there is no such outcome.
        """
        if outcome not in OUTCOMES:
            raise ValueError(f"outcome {outcome!r}; expected one of {', '.join(OUTCOMES)}")
        self.counts[outcome] += 1
        if outcome in _BAD:
            self.failures.append(f"{outcome}: {detail}")

    def row(self) -> str:
        """Format the row of the table; for this process, its peak memory so far."""
        peak_mb = _peak_memory_mb() if self.peak_mb is None else self.peak_mb
        numbers = [f"{self.counts[name]:,}" for name in OUTCOMES]
        cells = [self.what, f"{self.counts.total():,}", *numbers, f"{peak_mb:,.0f} MB"]
        return f"| {' | '.join(cells)} |"

    @staticmethod
    def report(tallies: Iterable[Tally]) -> int:
        """Print the table, and the failures below it; return an exit status, 0 without failures."""
        tallies = list(tallies)
        print(HEADER)
        for tally in tallies:
            print(tally.row())
        failures = [f"{tally.what}: {each}" for tally in tallies for each in tally.failures]
        for failure in failures:
            print(failure, file=sys.stderr)
        return int(bool(failures))


def _peak_memory_mb() -> float:
    """Return the peak resident size of this process in megabytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3
