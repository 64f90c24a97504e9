"""Lists of words, written as text."""

from __future__ import annotations


def listed(text: str) -> list[str]:
    """The words between spaces and line ends."""
    return text.split()
