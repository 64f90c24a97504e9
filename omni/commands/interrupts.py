"""Ctrl-C, and what a system sends in its place to end a process."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

__all__ = ["Terminated", "exit_status", "run_interruptibly", "sigterm_interrupts"]


class Terminated(KeyboardInterrupt):
    """SIGTERM came, which ends a command like Ctrl-C, with another exit status."""


def exit_status(interrupt: KeyboardInterrupt) -> int:
    """The exit status that shells expect: 128 and the number of the signal."""
    sent = signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT
    return 128 + sent


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Raise :class:`Terminated` in the main thread when SIGTERM comes; it would end in silence.

    A SIGTERM that somebody handles or ignores already is left to them.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run_interruptibly(work: Coroutine[Any, Any, None]) -> None:
    """``asyncio.run``, which cancels the work when Ctrl-C or SIGTERM comes.

    What is raised in the middle of whatever the loop is doing would break that off instead.

    Raises:
        Terminated: SIGTERM came, where :func:`sigterm_interrupts` has it raised.
        KeyboardInterrupt: Ctrl-C.
    """
    match asyncio.run(_interrupted(work)):
        case signal.SIGTERM:
            raise Terminated
        case signal.SIGINT:
            raise KeyboardInterrupt


async def _interrupted(work: Coroutine[Any, Any, None]) -> signal.Signals | None:
    """Await the work; the signal that has ended it."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    came: list[signal.Signals] = []

    def interrupt(sent: signal.Signals) -> None:
        came.append(sent)
        task.cancel()

    handlers = {sent: signal.getsignal(sent) for sent in (signal.SIGINT, signal.SIGTERM)}
    heard = []
    if threading.current_thread() is threading.main_thread():
        # Ctrl-C unless it is ignored; SIGTERM unless it is somebody else's.
        heard += [signal.SIGINT] if callable(handlers[signal.SIGINT]) else []
        heard += [signal.SIGTERM] if handlers[signal.SIGTERM] is _terminate else []
    for sent in heard:
        loop.add_signal_handler(sent, interrupt, sent)
    try:
        await work
    except asyncio.CancelledError:
        if not came:
            raise
    finally:
        for sent in heard:
            loop.remove_signal_handler(sent)
            signal.signal(sent, handlers[sent])
    return came[0] if came else None


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated
