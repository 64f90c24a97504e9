"""An event loop that Ctrl-C and SIGTERM end in order."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import Any

from omni.commands.interrupts import Terminated, terminate

__all__ = ["run_interruptibly"]


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
        # Ctrl-C unless it is ignored; SIGTERM unless another handler than ours is set.
        heard += [signal.SIGINT] if callable(handlers[signal.SIGINT]) else []
        heard += [signal.SIGTERM] if handlers[signal.SIGTERM] is terminate else []
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
