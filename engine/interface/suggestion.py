"""The end of an error message about a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["suggest"]


def suggest(name: str, known: Iterable[str]) -> str:
    """Say what could have been meant: the nearest known name, or all of them.

    Args:
        name: what was given.
        known: the names that would have been right.

    Returns:
        ``"; did you mean 'x'?"``, or ``"; known are 'x', 'y'"`` when nothing is near, or nothing
        when nothing is known.
    """
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    if near:
        return f"; did you mean {near[0]!r}?"
    return "; known are " + ", ".join(repr(known_name) for known_name in names) if names else ""
