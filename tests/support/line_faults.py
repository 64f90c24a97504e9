"""Exceptions raised at any line, or between any two bytecodes, of a call."""

from __future__ import annotations

import dis
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("engine", "prefix_cache", "stages")

_RETURN_VALUE = dis.opmap["RETURN_VALUE"]
_LOAD_CONST, _SWAP = dis.opmap["LOAD_CONST"], dis.opmap["SWAP"]

Event = tuple[CodeType, int]
"""A line, or a bytecode by its position, of a function."""


class LineFault:
    """While entered, raises once, before the n-th line that runs in our own source files.

    ::

        with LineFault(17, MemoryError):
            engine.step()          # MemoryError from whatever line is the 17th

    No exception is raised where a function is about to return its value: Python delivers signals
    when a function begins, at a loop's turn and after calls, and nothing is allocated there. The
    return value would be lost undetectably. Nor where the block of a ``with`` ends, before
    ``__exit__`` is called: locks would be held for ever.

    Args:
        nth: which line, from 0; -1 records all lines and raises nothing.
        error: the exception to raise.
        bytecodes: count bytecodes instead of lines, as a signal may come between any two.
        folders: folders of the repository whose files count.
        at: count this line alone.

    Attributes:
        events: what ran, in order, if nothing is to be raised.
        num_events: number of lines or bytecodes seen.
        place: ``file:line`` where it was raised; None if the call ended before.
    """

    def __init__(
        self,
        nth: int,
        error: type[BaseException] = MemoryError,
        *,
        bytecodes: bool = False,
        folders: Sequence[str] = _FOLDERS,
        at: Event | None = None,
    ) -> None:
        self._folders = tuple(f"{_ROOT / name}/" for name in folders)
        self._nth = nth
        self._error = error
        self._at = at
        self._event = "opcode" if bytecodes else "line"
        self.events: list[Event] = []
        self.num_events = 0
        self.place: str | None = None

    def __enter__(self) -> LineFault:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._folders):
            return None
        if self._event == "opcode":
            frame.f_trace_opcodes = True
        return self._line

    def _is_return(self, frame: FrameType) -> bool:
        code = frame.f_code.co_code
        return self._event == "opcode" and code[frame.f_lasti] == _RETURN_VALUE

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if (
            event == self._event
            and self.place is None
            and not (self._is_return(frame) or _ends_with_block(frame))
        ):
            if self._at is not None and (frame.f_code, frame.f_lineno) != self._at:
                return self._line
            if self._nth < 0:
                where = frame.f_lasti if event == "opcode" else frame.f_lineno
                self.events.append((frame.f_code, where))
            elif self.num_events == self._nth:
                file = Path(frame.f_code.co_filename).relative_to(_ROOT)
                self.place = f"{file}:{frame.f_lineno} in {frame.f_code.co_qualname}"
                if event == "opcode":
                    self.place += f", bytecode {frame.f_lasti}"
                raise self._error(f"a fault on purpose at {self.place}")
            self.num_events += 1
        return self._line


def _ends_with_block(frame: FrameType) -> bool:
    """Return True if ``__exit__(None, None, None)`` is about to be called."""
    code = frame.f_code.co_code[frame.f_lasti :]
    if code[0] == _SWAP:  # below the return value of a function that returns inside the block
        code = code[2:]
    return code[0] == _LOAD_CONST and code[0:2] == code[2:4] == code[4:6]


def choose_events(
    steps: Sequence[Iterable[Event]], repeats: int, draw: random.Random
) -> list[tuple[int, int]]:
    """Return every line that ran, in up to ``repeats`` steps or loop turns each, in order.

    Args:
        steps: what ran in each step.
        repeats: maximum occurrences of one line.
        draw: chooses among more.

    Returns:
        Numbers of steps, and of events in them.
    """
    found: dict[Event, list[tuple[int, int]]] = {}
    for step, events in enumerate(steps):
        for number, event in enumerate(events):
            found.setdefault(event, []).append((step, number))
    chosen = [
        each for places in found.values() for each in draw.sample(places, min(repeats, len(places)))
    ]
    return sorted(chosen)
