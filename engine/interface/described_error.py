"""An exception as one line, whatever its class does."""

from __future__ import annotations

__all__ = ["described"]


def described(error: BaseException) -> str:
    """``"KeyError: 'x'"``; the class alone if the exception cannot say what it is."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception:  # its class is a stranger's, and so is what it does to be shown
        return name
