"""What log records tell besides their message: the stage, its replica, and the request."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass

_ROOT = "omni"


@dataclass(frozen=True, slots=True)
class LogFields:
    """What a record is about; None for what it is not about."""

    stage: str | None = None
    replica: int | None = None
    request_id: str | None = None


_FIELDS: ContextVar[LogFields | None] = ContextVar("omni_log_fields", default=None)
_of_process = LogFields()


def set_process_fields(fields: LogFields) -> None:
    """Say what every record of this process is about, in all of its threads."""
    global _of_process
    _of_process = fields


class log_fields:
    """Have what is logged within, in this thread, carry a stage and a request; to be used once."""

    # Entered around every call of a stage: several times cheaper than a generator's context.
    __slots__ = ("_token", "fields")

    def __init__(self, stage: str, request_id: str | None = None) -> None:
        self.fields = LogFields(stage, _of_process.replica, request_id)

    def __enter__(self) -> None:
        self._token = _FIELDS.set(self.fields)

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        _FIELDS.reset(self._token)


def package_logger(name: str) -> logging.Logger:
    """A logger of a module's ``__name__``, below ``omni``, with attributes of ``LogFields``."""
    is_below = name == _ROOT or name.startswith(f"{_ROOT}.")
    logger = logging.getLogger(name if is_below else f"{_ROOT}.{name}")
    logger.addFilter(_FILTER)
    return logger


class _Fields(logging.Filter):
    """Lets all records pass, with their fields; those given by ``extra`` stay."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Put the fields on a record."""
        fields = _FIELDS.get() or _of_process
        for name in LogFields.__slots__:
            if not hasattr(record, name):
                setattr(record, name, getattr(fields, name))
        return True


_FILTER = _Fields()
