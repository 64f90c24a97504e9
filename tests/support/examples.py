"""How many examples a property is tried with."""

from __future__ import annotations

from hypothesis import settings

USUAL, LONG = 30, 2000
"""Examples of a property that does not say how many it wants, in the usual profile and in the long
one."""


def examples(number: int) -> int:
    """A number for a profile of 100, scaled to the present one: 30 in 100 usually.

    Each run of the tests draws others; ``torture/properties.py`` looks further.
    """
    return max(1, number * settings().max_examples // 100)
