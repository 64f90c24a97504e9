"""Exceptions that are raised at any line, or between any two bytecodes, of a call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["LineFault", "count_events"]

_ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = tuple(f"{_ROOT / name}/" for name in ("engine", "prefix_cache", "stages"))


class LineFault:
    """While it is entered, raises once, before the n-th line that runs in our own source files.

    ::

        with LineFault(17, MemoryError):
            engine.step()          # MemoryError out of whatever line is the 17th

    Args:
        nth: which line, from 0; -1 counts lines and raises nothing.
        error: what is raised.
        bytecodes: count bytecodes instead of lines, as a signal may come between any two.

    Attributes:
        num_events: lines or bytecodes that were seen.
        place: ``file:line`` where it was raised; None if the call ended before.
    """

    def __init__(
        self, nth: int, error: type[BaseException] = MemoryError, *, bytecodes: bool = False
    ) -> None:
        self._nth = nth
        self._error = error
        self._event = "opcode" if bytecodes else "line"
        self.num_events = 0
        self.place: str | None = None

    def __enter__(self) -> LineFault:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_FOLDERS):
            return None
        if self._event == "opcode":
            frame.f_trace_opcodes = True
        return self._line

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == self._event and self.place is None:
            if self.num_events == self._nth:
                file = Path(frame.f_code.co_filename).relative_to(_ROOT)
                self.place = f"{file}:{frame.f_lineno} in {frame.f_code.co_qualname}"
                raise self._error(f"a fault on purpose at {self.place}")
            self.num_events += 1
        return self._line


def count_events(call: Callable[[], object], *, bytecodes: bool = False) -> int:
    """How many lines, or bytecodes, of our own files a call runs."""
    with LineFault(-1, bytecodes=bytecodes) as counted:
        call()
    return counted.num_events
