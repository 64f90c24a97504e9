"""The error of bookkeeping that does not agree with itself."""

from __future__ import annotations

__all__ = ["IntegrityError"]


class IntegrityError(RuntimeError):
    """Two records of the same fact differ; the message prints both with their numbers."""
