"""Finds stop strings in a text that grows."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Finds stop strings in a text that grows.

    The outcome is that of reading the text one character at a time, so it does not depend on
    where tokens begin and end: the first character that completes a stop string ends the text.

    Args:
        stop: non-empty strings; none at all never match.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)

    def find(self, text: str, num_passed: int) -> int | None:
        """Where the text must be cut, or None.

        Args:
            text: all of it so far.
            num_passed: matches that end within the first ``num_passed`` characters are over.
        """
        matches: list[tuple[int, int]] = []
        for stop in self._stop:
            start = text.find(stop, max(0, num_passed + 1 - len(stop)))
            if start >= 0:
                matches.append((start + len(stop), start))
        return min(matches)[1] if matches else None

    def num_undecided(self, text: str) -> int:
        """How many of the last characters may turn out to begin a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) and len(stop) > length for stop in self._stop):
                return length
        return 0
