"""How late an event loop is, whatever it is busy with."""

from __future__ import annotations

from omni.commands.bench.clock import Clock

__all__ = ["LoopLag"]

_EVERY_S = 0.01


class LoopLag:
    """Asks to be woken again and again, and notes how much later it was.

    What arrives while the loop is late is seen late by as much: the lag bounds from below how far
    off the times are that are measured in the loop.

    Args:
        clock: what it looks at.

    Attributes:
        lags: seconds, one for every time that it was woken.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.lags: list[float] = []

    async def run(self) -> None:
        """Go on until it is cancelled."""
        while True:
            planned = self._clock.now() + _EVERY_S
            await self._clock.sleep_until(planned)
            self.lags.append(max(0.0, self._clock.now() - planned))
