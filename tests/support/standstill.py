"""Shows where a test stands still."""

from __future__ import annotations

import faulthandler
import os
import sys
import time

__all__ = ["StandstillWatch"]


class StandstillWatch:
    """Prints the stacks of all threads where a test stands still for minutes.

    It asks Python to print them later, and again and again to print them later than that. A thread
    begins and ends with each time it asks, and there are thousands of tests: so it asks only if a
    while has passed.

    Args:
        timeout_s: after which they are printed, counted from the last time that it asked.
        renewal_s: between two times. A test that begins in between stands still for so much less.
    """

    def __init__(self, timeout_s: float, renewal_s: float) -> None:
        self.timeout_s = timeout_s
        self.renewal_s = renewal_s
        # A copy: tests are captured by putting something else in the place of the standard error.
        self._stderr = os.dup(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2)
        self._asked_at: float | None = None

    def begin_test(self) -> None:
        """Say that something moves."""
        now = time.monotonic()
        if self._asked_at is None or now - self._asked_at >= self.renewal_s:
            faulthandler.dump_traceback_later(self.timeout_s, file=self._stderr)
            self._asked_at = now

    def forget(self) -> None:
        """Print nothing, until a test begins again."""
        faulthandler.cancel_dump_traceback_later()
        self._asked_at = None

    def close(self) -> None:
        """Print nothing more."""
        self.forget()
        os.close(self._stderr)
