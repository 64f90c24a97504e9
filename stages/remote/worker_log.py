"""Forwards the log records of workers to the process that started them."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable

import msgspec

from engine.interface.log_fields import LogFields, set_process_fields

_ROOT = "omni"
_MAX_CHARS = 2**16
"""Maximum number of characters of a message, and of a traceback."""


class Logged(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A log record as text; ``stage``, ``replica`` and ``request_id`` are ``LogFields``."""

    logger: str
    level: int
    message: str
    traceback: str | None = None
    stage: str | None = None
    replica: int | None = None
    request_id: str | None = None


class LogForwarder(logging.Handler):
    """Sends each record to another process; ``send`` raises ``ConnectionError`` if it is gone."""

    def __init__(self, send: Callable[[Logged], None]) -> None:
        super().__init__()
        self._send = send
        self._thread_state = threading.local()

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record; records logged while sending are dropped."""
        if getattr(self._thread_state, "is_sending", False):
            return
        self._thread_state.is_sending = True
        try:
            self._send(_logged(record))
        except ConnectionError:
            pass  # the other process is gone, and this worker is about to end
        except Exception:  # like logging itself: a record that cannot be sent must not end the work
            self.handleError(record)
        finally:
            self._thread_state.is_sending = False


def forward_log(send: Callable[[Logged], None], level: int, fields: LogFields) -> LogForwarder:
    """Send this process's log records of at least a level only to the process that started it.

    The fields are attached to all of its records.
    """
    set_process_fields(fields)
    forwarder = LogForwarder(send)
    logger = logging.getLogger(_ROOT)
    logger.addHandler(forwarder)
    logger.setLevel(level)
    logger.propagate = False
    return forwarder


def relay(logged: Logged) -> None:
    """Log a worker's record as if it had been logged in this process."""
    is_ours = logged.logger == _ROOT or logged.logger.startswith(f"{_ROOT}.")
    logger = logging.getLogger(logged.logger if is_ours else _ROOT)
    if not logger.isEnabledFor(logged.level):
        return
    record = logger.makeRecord(logger.name, logged.level, "", 0, "%s", (logged.message,), None)
    record.exc_text = logged.traceback
    for name in LogFields.__slots__:
        setattr(record, name, getattr(logged, name))
    logger.handle(record)


def _logged(record: logging.LogRecord) -> Logged:
    text = None
    if record.exc_info and record.exc_info[1] is not None:
        text = "".join(traceback.format_exception(record.exc_info[1])).rstrip()
    return Logged(
        record.name,
        record.levelno,
        record.getMessage()[:_MAX_CHARS],
        # The end of a traceback contains the error.
        None if text is None else text[-_MAX_CHARS:],
        **{name: getattr(record, name, None) for name in LogFields.__slots__},
    )
