"""Lists of words, written as text."""

from __future__ import annotations

__all__ = ["listed"]


def listed(text: str) -> list[str]:
    """The words between spaces and line ends."""
    return text.split()
