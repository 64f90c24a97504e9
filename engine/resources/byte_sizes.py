"""Sizes in bytes, for people."""

from __future__ import annotations

__all__ = ["format_bytes"]


def format_bytes(size: int) -> str:
    """Bytes for people: ``1536`` is ``1.5 KiB``."""
    if size < 1024:
        return f"{size} B"
    value, unit = size / 1024, "KiB"
    for larger in ("MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}"
