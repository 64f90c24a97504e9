"""Context fields of log records: the stage, its replica, and the request."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass

_ROOT = "omni"


@dataclass(frozen=True, slots=True)
class LogFields:
    """The context of a log record; None for fields that do not apply."""

    stage: str | None = None
    replica: int | None = None
    request_id: str | None = None


_FIELDS: ContextVar[LogFields | None] = ContextVar("omni_log_fields", default=None)
_of_process = LogFields()


def set_process_fields(fields: LogFields) -> None:
    """Set the fields of every record of this process, in all its threads."""
    global _of_process
    _of_process = fields


class log_fields:
    """Context that adds a stage and a request to this thread's log records; single use."""

    # Entered around every call of a stage: several times cheaper than @contextmanager.
    __slots__ = ("_token", "fields")

    def __init__(self, stage: str, request_id: str | None = None) -> None:
        self.fields = LogFields(stage, _of_process.replica, request_id)

    def __enter__(self) -> None:
        self._token = _FIELDS.set(self.fields)

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        _FIELDS.reset(self._token)


def package_logger(name: str) -> logging.Logger:
    """Return a module's logger, below ``omni``, whose records have the fields of ``LogFields``."""
    is_below = name == _ROOT or name.startswith(f"{_ROOT}.")
    logger = logging.getLogger(name if is_below else f"{_ROOT}.{name}")
    logger.addFilter(_FILTER)
    return logger


class _Fields(logging.Filter):
    """Adds the fields to all records, except those given by ``extra``."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Set the fields on a record."""
        fields = _FIELDS.get() or _of_process
        for name in LogFields.__slots__:
            if not hasattr(record, name):
                setattr(record, name, getattr(fields, name))
        return True


_FILTER = _Fields()
