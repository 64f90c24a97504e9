"""The time, and waiting for it."""

from __future__ import annotations

import asyncio
import time

__all__ = ["Clock"]


class Clock:
    """The monotonic clock of this machine. Tests put another in its place."""

    def now(self) -> float:
        """Seconds since some point in the past."""
        return time.perf_counter()

    def cpu(self) -> float:
        """Seconds of CPU that this process has used, in all of its threads."""
        return time.process_time()

    async def sleep_until(self, moment: float) -> None:
        """Wait until the clock shows a time; others run meanwhile, also if it has passed."""
        await asyncio.sleep(max(0.0, moment - self.now()))
