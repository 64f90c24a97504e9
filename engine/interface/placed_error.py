"""Errors in settings: their place, their cause in one line, and the nearest known name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TypeAlias

_LONGEST_VALUE = 80
"""Characters of a value that a message repeats."""


def shortened(value: object) -> str:
    """Write a value as it came, or its beginning: it may be a whole conversation."""
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def described(error: BaseException) -> str:
    """``"KeyError: 'x'"``; the class alone if the exception cannot say what it is."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception:  # its class, and what that does to be shown, is a user's
        return name


def suggest(name: str, known: Iterable[str]) -> str:
    """Say what could have been meant: the nearest known name, or all of them.

    Returns:
        ``"; did you mean 'x'?"``, or ``"; known are 'x', 'y'"`` when nothing is near, or nothing
        when nothing is known.
    """
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    if near:
        return f"; did you mean {near[0]!r}?"
    return "; known are " + ", ".join(repr(known_name) for known_name in names) if names else ""


KeyPath: TypeAlias = tuple[str | int, ...]
"""Where a value stands in a document: the keys and list indices that lead to it."""


class PlacedError(ValueError):
    """A mistake found by a check of several places, with the keys and indices that lead to it."""

    def __init__(self, place: KeyPath, message: str) -> None:
        super().__init__(message)
        self.place = place
