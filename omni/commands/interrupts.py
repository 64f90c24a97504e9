"""Ctrl-C, and what a system sends in its place to end a process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

__all__ = ["Terminated", "exit_status", "sigterm_interrupts", "terminate"]


class Terminated(KeyboardInterrupt):
    """SIGTERM came, which ends a command like Ctrl-C, with another exit status."""


def exit_status(interrupt: KeyboardInterrupt) -> int:
    """The exit status that shells expect: 128 and the number of the signal."""
    sent = signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT
    return 128 + sent


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Raise :class:`Terminated` in the main thread when SIGTERM comes; it would end in silence.

    Nothing is changed where another handler of SIGTERM is set, or where it is ignored.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """What handles SIGTERM within :func:`sigterm_interrupts`."""
    raise Terminated
