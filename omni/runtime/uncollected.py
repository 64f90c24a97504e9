"""Keeps garbage collections away from what a program loads when it starts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["keep_for_good", "leave_to_the_end", "let_age", "uncollected"]

_ages = False


def let_age() -> None:
    """Have what is made within :func:`uncollected` count as old from now on.

    For a program of ours: somebody else's may have set objects apart by ``gc.freeze``, which that
    would undo. (To ask for their number takes as long as a look at each of them.)
    """
    global _ages
    _ages = True


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage meanwhile.

    Imports and the building of stages make a million objects, nearly all of which stay. The
    collections that their number alone calls for find nothing and take a tenth of the time; after
    :func:`let_age` there is none afterwards either. Garbage among them is found by the next full
    collection.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if _ages:
                gc.freeze()
                gc.unfreeze()  # by both, all objects become old, and none counts as new
            gc.enable()


def keep_for_good() -> None:
    """Leave all objects that are there now out of later collections; for a program that has loaded.

    With libraries and models there are a million, and to look through them takes a quarter of a
    second, in which no thread of the process goes on. What of them becomes garbage later is not
    found any more, unless nothing refers to it: not for a library, whose user may unload things.
    """
    global _ages
    _ages = False
    gc.collect()
    gc.freeze()


def leave_to_the_end() -> None:
    """Have the interpreter look for no garbage when it ends: the memory goes with the process.

    It would look through all objects several times, which takes longer than many a command. For a
    program that has closed what it opened; functions of ``atexit`` and ``weakref.finalize`` run all
    the same.
    """
    gc.freeze()
