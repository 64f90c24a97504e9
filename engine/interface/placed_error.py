"""A mistake in a setting, with the place of the setting."""

from __future__ import annotations

from typing import TypeAlias

__all__ = ["KeyPath", "PlacedError"]

KeyPath: TypeAlias = tuple[str | int, ...]
"""Where a value stands in a document: the keys and list indices that lead to it."""


class PlacedError(ValueError):
    """A mistake found by a check that looks at several places, with the one to name.

    Args:
        place: keys and indices that lead to the wrong value.
        message: what is wrong there.
    """

    def __init__(self, place: KeyPath, message: str) -> None:
        super().__init__(message)
        self.place = place
