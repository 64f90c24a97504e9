"""Brings what other threads post into event loops."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["LoopMail"]

_Letter: TypeAlias = tuple[Callable[[Any], object], Any]


class LoopMail:
    """Hands out in an event loop what other threads post: all that has come, by one wake-up.

    To wake a loop takes a system call, and lets its thread compete with the one that posts. A turn
    of a pipeline has something of many requests at once: a wake-up for each would cost more
    than what is done with them.

    Args:
        loop: in whose thread it is handed out.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: deque[_Letter] = deque()
        self._is_called = False

    @classmethod
    def here(cls) -> LoopMail:
        """The mail of the loop that runs in this thread."""
        loop = asyncio.get_running_loop()
        mail = _MAILS.get(loop)
        if mail is None:
            for other in list(_MAILS):
                if other.is_closed():
                    _MAILS.pop(other, None)
            mail = _MAILS[loop] = cls(loop)
        return mail

    def post(self, take: Callable[[Any], object], letter: Any) -> None:
        """Have ``take(letter)`` called in the loop, after what was posted before; from any thread.

        Raises:
            RuntimeError: the loop is closed.
        """
        if self._loop.is_closed():
            self._letters.clear()
            raise RuntimeError("the event loop is closed")
        self._letters.append((take, letter))
        if not self._is_called:
            try:
                # Before it is called: it may be done with its work before this thread goes on.
                self._is_called = True
                self._loop.call_soon_threadsafe(self._hand_out)
            except BaseException:
                self._is_called = False
                raise

    def _hand_out(self) -> None:
        # First, so that what is posted from here on either is seen below or calls again.
        self._is_called = False
        letters = self._letters
        try:
            while letters:
                take, letter = letters.popleft()
                take(letter)
        finally:
            if letters:  # one was not taken, and the loop knows why; the others go on
                self._loop.call_soon(self._hand_out)


_MAILS: dict[asyncio.AbstractEventLoop, LoopMail] = {}
