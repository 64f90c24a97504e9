"""The number of examples of a property."""

from __future__ import annotations

from hypothesis import settings

USUAL, LONG = 20, 2000
"""Default number of examples of a property, in the usual profile and in the long one."""


def examples(number: int) -> int:
    """Scale a number for a profile of 100 to the current profile: usually 20 in 100.

    Each run of the tests draws other examples; ``torture/properties.py`` tries more.
    """
    return max(1, number * settings().max_examples // 100)
