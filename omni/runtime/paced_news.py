"""Passes a request's outputs on into an event loop, those with nothing but more text in batches."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from math import isfinite

from engine.interface.arguments import check_argument
from omni.requests.request import OmniOutput
from omni.runtime.loop_mail import LoopMail

__all__ = ["PacedNews"]


class PacedNews:
    """A sink of one request that keeps text back for a moment, and hands it on with what follows.

    Each output that is handed on takes the interpreter from the thread that drives the stages, and
    wakes whoever reads it. Text that is read along with speech can come a few times a second ::

        driver     a   ab  abc  abcd  sound  abcde  abcdef     (each has all the text so far)
        the loop   a       abc        sound         abcdef     ab, abcd and abcde are never seen

    The first text waits for nothing, nor does an output with sound, one with which the request has
    entered or left a stage, or the last.

    Args:
        mail: into the loop, in which this is made.
        take: called there with what is handed on.
        gap_s: outputs of text are so many seconds apart, or further. Where none follows, one is
            kept for no more than twice that.

    Raises:
        ValueError: ``gap_s`` is no number of seconds.
    """

    def __init__(
        self, mail: LoopMail, take: Callable[[OmniOutput | BaseException], object], gap_s: float
    ) -> None:
        check_argument("text_gap_s", gap_s, int | float, "a number of seconds")
        if not (isfinite(gap_s) and gap_s >= 0):
            raise ValueError(f"text_gap_s must be a number of seconds, 0 or more, got {gap_s}")
        self._mail = mail
        self._take = take
        self._gap_s = gap_s
        self._loop = asyncio.get_running_loop()
        self._next_s = 0.0
        # What the driver keeps back, at most one, with how many it had posted before; whoever takes
        # it out hands it on or drops it.
        self._kept: deque[tuple[int, OmniOutput]] = deque(maxlen=1)
        self._num_posted = 0
        self._num_handed_on = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def put(self, news: OmniOutput | BaseException) -> None:
        """Hand an output on now, or keep it; in the driver's thread.

        Raises:
            RuntimeError: the loop is closed.
        """
        if isinstance(news, OmniOutput) and _is_text_that_goes_on(news) and self._keeps(news):
            return
        self._kept.clear()  # what comes has all the text that it had
        self._num_posted += 1
        # Not before anything is said: the first text waits for nothing.
        if isinstance(news, OmniOutput) and any(each.text for each in news.stages.values()):
            self._next_s = time.monotonic() + self._gap_s
        self._mail.post(self._hand_on, news)

    def close(self) -> None:
        """Hand on nothing more; in the loop."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _keeps(self, news: OmniOutput) -> bool:
        """Keep it if there is time, and say whether the loop gets it later; in the driver."""
        if time.monotonic() >= self._next_s:
            return False
        self._kept.append((self._num_posted, news))
        if time.monotonic() < self._next_s:
            return True
        # This thread was held up, and the loop may have looked for it in vain meanwhile.
        try:
            self._kept.pop()
        except IndexError:  # it has found it
            return True
        return False

    def _hand_on(self, news: OmniOutput | BaseException) -> None:
        self._num_handed_on += 1
        if self._is_closed:
            return
        # The driver keeps nothing back any more when this timer is up, unless more was handed on.
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(2 * self._gap_s, self._look)
        self._take(news)

    def _look(self) -> None:
        if self._kept:
            try:
                kept = self._kept.pop()
            except IndexError:  # the driver has dropped it meanwhile, and hands on a newer one
                return
            # Behind what was posted before it, which may still be on its way.
            self._mail.post(self._hand_on_kept, kept)

    def _hand_on_kept(self, kept: tuple[int, OmniOutput]) -> None:
        num_posted, news = kept
        # Otherwise a newer one was handed on meanwhile.
        if num_posted == self._num_handed_on and not self._is_closed:
            self._take(news)


def _is_text_that_goes_on(output: OmniOutput) -> bool:
    if output.finished or output.timeline:
        return False
    return all(stage.audio_delta is None for stage in output.stages.values())
