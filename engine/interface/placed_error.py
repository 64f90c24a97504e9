"""Errors in settings: their place, their cause in one line, and the nearest known name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TypeAlias

_MAX_VALUE_CHARS = 80
"""Maximum characters of a value that a message repeats."""


def shortened(value: object) -> str:
    """Return a value's ``repr``, truncated: it may be a whole conversation."""
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."


def described(error: BaseException) -> str:
    """Return ``"KeyError: 'x'"``; the class name alone if the exception's ``str`` fails."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception:  # a user's exception class may raise anything here
        return name


def suggest(name: str, known: Iterable[str]) -> str:
    """Suggest the nearest known name, or list all of them.

    Returns:
        ``"; did you mean 'x'?"``, or ``"; known are 'x', 'y'"`` if no name is near, or ``""`` if no
        name is known.
    """
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    if near:
        return f"; did you mean {near[0]!r}?"
    return "; known are " + ", ".join(repr(known_name) for known_name in names) if names else ""


KeyPath: TypeAlias = tuple[str | int, ...]
"""Location of a value in a document: the keys and list indices that lead to it."""


class PlacedError(ValueError):
    """A mistake found by a check of several values, with the location of the wrong one."""

    def __init__(self, place: KeyPath, message: str) -> None:
        super().__init__(message)
        self.place = place
