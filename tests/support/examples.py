"""How many examples a property is tried with."""

from __future__ import annotations

from hypothesis import settings

__all__ = ["LONG", "USUAL", "examples"]

USUAL, LONG = 50, 1000
"""Examples of a property that does not say how many it wants, in either profile."""


def examples(number: int) -> int:
    """So many in the usual profile, and in the long one more of them in proportion.

    Each run is to find what a change breaks within seconds, or within the next few runs, which
    draw other examples; ``torture/properties.py`` looks further.
    """
    return max(1, number * settings().max_examples // USUAL)
