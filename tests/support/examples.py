"""How many examples a property is tried with."""

from __future__ import annotations

from hypothesis import settings

__all__ = ["LONG", "USUAL", "examples"]

USUAL, LONG = 100, 2000
"""Examples of a property that does not say how many it wants, in the usual profile (hypothesis' own
number) and in the long one."""


def examples(number: int) -> int:
    """So many in the usual profile, and 20 times as many in the long one.

    Each run of the tests draws others; ``torture/properties.py`` looks further.
    """
    return max(1, number * settings().max_examples // USUAL)
