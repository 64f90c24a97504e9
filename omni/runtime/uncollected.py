"""Puts garbage collections off while a program starts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uncollected"]


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage meanwhile.

    Imports and the building of stages make a million objects, nearly all of which stay. The
    collections that their number alone calls for find nothing and take a tenth of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
