"""Word lists written as text."""

from __future__ import annotations


def listed(text: str) -> list[str]:
    """Return the words of a text, split at whitespace."""
    return text.split()
