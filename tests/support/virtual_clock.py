"""An event loop with a virtual clock: nothing really waits, and all times are exact."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class _VirtualLoop(asyncio.SelectorEventLoop):
    """Jumps to its next timer as soon as nothing can run without waiting."""

    def __init__(self, lateness: float) -> None:
        super().__init__(_JumpingSelector(self))
        self.moment = 100.0
        self._lateness = lateness

    def time(self) -> float:
        return self.moment

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return super().call_at(when + self._lateness, callback, *args, context=context)


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: _VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everything waits, and nothing for the time"
        self._loop.moment = round(self._loop.moment + timeout, 9)
        return super().select(0)


def run_virtually(work: Coroutine[Any, Any, _T], *, lateness: float = 0.0) -> _T:
    """Run a coroutine to its end on an event loop whose clock begins at 100 s."""
    with asyncio.Runner(loop_factory=partial(_VirtualLoop, lateness)) as runner:
        return runner.run(work)
