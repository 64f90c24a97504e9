"""The error that a wrong pipeline configuration raises."""

from __future__ import annotations

__all__ = ["ConfigError", "PlacedError"]


class ConfigError(ValueError):
    """A pipeline configuration is wrong. The message names each wrong place and what to do."""


class PlacedError(ValueError):
    """A mistake found by a check that looks at several places, with the one to name.

    Args:
        place: keys and indices that lead to the wrong value.
        message: what is wrong there.
    """

    def __init__(self, place: tuple[str | int, ...], message: str) -> None:
        super().__init__(message)
        self.place = place
