"""What the packages log, as lines for the person at the terminal."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["shown_log"]

_LOGGER = "omni"
_QUIET = -1
_LEVELS = {_QUIET: logging.ERROR, 0: logging.WARNING, 1: logging.INFO}


@contextmanager
def shown_log(verbosity: int, *, tracebacks: bool) -> Iterator[None]:
    """Write the log to the standard error for as long as the context lasts.

    Args:
        verbosity: -1 for errors only, 0 for warnings too, 1 for what is decided, such as which
            kernels run, 2 for all.
        tracebacks: whether an exception is shown with where it was raised.
    """
    logger = logging.getLogger(_LOGGER)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines(tracebacks=tracebacks, with_place=verbosity >= 1))
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(_LEVELS.get(verbosity, logging.DEBUG))
    # Not once more through a handler of the root logger, which a library may have put there.
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


class _Lines(logging.Formatter):
    """``warning: what happened``, in one line unless tracebacks are wanted.

    With its place: ``warning: [writer/1 prompt-3] what happened``.
    """

    def __init__(self, *, tracebacks: bool, with_place: bool) -> None:
        super().__init__("%(levelname)s: %(message)s")
        self._tracebacks = tracebacks
        self._with_place = with_place

    def format(self, record: logging.LogRecord) -> str:
        """Write a record."""
        shown = copy.copy(record)
        shown.levelname = record.levelname.lower()
        if self._with_place and (place := _place(record)):
            shown.msg, shown.args = f"[{place}] {record.getMessage()}", ()
        if not self._tracebacks and (error := _error_of(record)):
            shown.msg, shown.args = f"{shown.getMessage()}: {error}", ()
            shown.exc_info = shown.exc_text = shown.stack_info = None
        return super().format(shown)


def _error_of(record: logging.LogRecord) -> str | None:
    """The exception that a record is about, in a line; of a worker's only the text has come."""
    if record.exc_info and record.exc_info[1] is not None:
        error = record.exc_info[1]
        return f"{type(error).__name__}: {error}"
    return record.exc_text.splitlines()[-1] if record.exc_text else None


def _place(record: logging.LogRecord) -> str:
    """The stage, its replica if there are workers, and the request that a record is about."""
    stage, replica = getattr(record, "stage", None), getattr(record, "replica", None)
    worker = stage if replica is None else f"{stage}/{replica}"
    parts = (worker if stage else None, getattr(record, "request_id", None))
    return " ".join(str(part) for part in parts if part is not None)
