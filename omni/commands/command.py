"""Commands whose arguments and flags are the fields of a dataclass."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from types import FrameType
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

PARAMETER = "parameter"
"""Key of the typer parameter in a field's metadata."""


def option(help: str, *names: str, default: Any = None, **settings: Any) -> Any:
    """Declare a flag; names and settings are passed to ``typer.Option``."""
    return field(default=default, metadata={PARAMETER: typer.Option(*names, help=help, **settings)})


def argument(help: str, default: Any = MISSING, **settings: Any) -> Any:
    """Declare a positional argument, required without a default; see ``typer.Argument``."""
    return field(default=default, metadata={PARAMETER: typer.Argument(help=help, **settings)})


@contextmanager
def sigterm_interrupts() -> Iterator[list[int]]:
    """Handle SIGTERM, which by default kills silently, like Ctrl-C; yield those that have come.

    Has no effect outside the main thread, or if SIGTERM is ignored or has another handler.
    """
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        # That of asyncio.run cancels its task instead of breaking off what the loop is doing.
        handle = signal.getsignal(signal.SIGINT)
        if not callable(handle):  # ignored, as in a job in the background of a shell
            raise KeyboardInterrupt
        handle(signal.SIGINT, frame)

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield received
        return
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


_LOGGER = "omni"
_LEVELS = {-1: logging.ERROR, 0: logging.WARNING, 1: logging.INFO}


@contextmanager
def shown_log(verbosity: int, *, tracebacks: bool) -> Iterator[None]:
    """Write the log to standard error within the context.

    Args:
        verbosity: -1 for errors only, 0 for warnings too, 1 for decisions such as which kernels
            run, 2 for everything.
        tracebacks: if true, exceptions are shown with their traceback.
    """
    logger = logging.getLogger(_LOGGER)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LogFormatter(tracebacks=tracebacks, with_location=verbosity >= 1))
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(_LEVELS.get(verbosity, logging.DEBUG))
    # A library may have added a handler to the root logger: do not log twice.
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


class _LogFormatter(logging.Formatter):
    """Formats ``warning: what happened``, in one line unless tracebacks are enabled.

    With the location: ``warning: [writer/1 prompt-3] what happened``.
    """

    def __init__(self, *, tracebacks: bool, with_location: bool) -> None:
        super().__init__("%(levelname)s: %(message)s")
        self._tracebacks = tracebacks
        self._with_location = with_location

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        shown = copy.copy(record)
        shown.levelname = record.levelname.lower()
        if self._with_location and (location := _location(record)):
            shown.msg, shown.args = f"[{location}] {record.getMessage()}", ()
        if not self._tracebacks and (error := _error_of(record)):
            shown.msg, shown.args = f"{shown.getMessage()}: {error}", ()
            shown.exc_info = shown.exc_text = shown.stack_info = None
        return super().format(shown)


def _error_of(record: logging.LogRecord) -> str | None:
    """Return a record's exception in one line; records from workers carry only its text."""
    if record.exc_info and record.exc_info[1] is not None:
        error = record.exc_info[1]
        return f"{type(error).__name__}: {error}"
    return record.exc_text.splitlines()[-1] if record.exc_text else None


def _location(record: logging.LogRecord) -> str:
    """Return the stage, its replica if there are workers, and the request of a record."""
    stage, replica = getattr(record, "stage", None), getattr(record, "replica", None)
    worker = stage if replica is None else f"{stage}/{replica}"
    parts = (worker if stage else None, getattr(record, "request_id", None))
    return " ".join(str(part) for part in parts if part is not None)


_FAILED = 1
"""Exit status if requests failed or differed, or on an unexpected error."""
_BAD_INPUT = 2
"""Exit status for user errors."""
_TRACEBACK = "OMNI_TRACEBACK"
"""Environment variable; 1 shows the traceback of every error."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CommandOptions:
    """Options common to all commands.

    Each field of a subclass is a parameter: an :func:`~omni.commands.command.option`, an
    ``argument``, or in typer's own form, ``Annotated[type, typer.Option(...)]``.
    """

    verbose: int = option(
        "Log decisions such as the selected kernels; -vv logs everything, with tracebacks.",
        "--verbose",
        "-v",
        default=0,
        count=True,
        show_default=False,
        metavar="",
    )
    quiet: bool = option("No progress, no summary, no warnings.", "--quiet", "-q", default=False)
    debug: bool = option("Show tracebacks of errors.", "--debug", default=False)

    @property
    def verbosity(self) -> int:
        """Log verbosity, from -1 (quiet) to 2."""
        return -1 if self.quiet else min(self.verbose, 2)

    @property
    def tracebacks(self) -> bool:
        """True if errors are shown with their traceback."""
        return self.debug or self.verbosity == 2 or os.environ.get(_TRACEBACK) == "1"


class Stopped(Exception):
    """A command stopped early; the message says what was done.

    Raised from a ``KeyboardInterrupt``, it ends with the exit status of the signal instead.
    """

    def __init__(self, message: str, status: int = _FAILED) -> None:
        super().__init__(message)
        self.status = status


class _Command(TyperCommand):
    """Command that reports invalid values in the same words as files and the Python API."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the arguments."""
        try:
            return super().make_context(*args, **kwargs)
        except typer.BadParameter as error:
            from pydantic import ValidationError

            from engine.interface.settings import explain_value_error

            # Newer versions of typer validate values with pydantic.
            if isinstance(error.__cause__, ValidationError):
                error.message = explain_value_error(error.__cause__)
            raise


_OptionsT = TypeVar("_OptionsT", bound=CommandOptions)
_COMMON_ORDER = {field.name: place for place, field in enumerate(fields(CommandOptions), start=1)}


def command(
    app: typer.Typer, options: type[_OptionsT], *, name: str | None = None
) -> Callable[[Callable[[_OptionsT], bool]], Callable[[_OptionsT], bool]]:
    """Create a decorator that registers a function as a command, called with its options object.

    Errors are shown as a line without a traceback, unless tracebacks are enabled. The exit status
    is 2 for a user's mistake, 1 for everything else.

    Args:
        name: name of the command; by default that of the function.

    Returns:
        The decorator. The decorated function returns True on success, else the exit status is 1.
    """
    hints = get_type_hints(options, include_extras=True)
    for each in fields(options):
        if (parameter := each.metadata.get(PARAMETER)) is not None:
            hints[each.name] = Annotated[hints[each.name], parameter]
    parameters = [
        parameter.replace(annotation=hints[name])
        for name, parameter in inspect.signature(options).parameters.items()
    ]
    parameters.sort(key=lambda parameter: _COMMON_ORDER.get(parameter.name, 0))

    def decorate(function: Callable[[_OptionsT], bool]) -> Callable[[_OptionsT], bool]:
        @functools.wraps(function)
        def run(**values: Any) -> None:
            status = _run(function, options(**values))
            if status:
                raise typer.Exit(status)

        run.__annotations__ = hints
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        app.command(name, cls=_Command)(run)
        return function

    return decorate


def _run(function: Callable[[_OptionsT], bool], given: _OptionsT) -> int:
    """Run a command; return its exit status."""
    # A terminal that cannot encode a character must not abort a run half-way.
    for stream in (sys.stdout, sys.stderr):
        getattr(stream, "reconfigure", lambda **_: None)(errors="backslashreplace")
    shown = shown_log(given.verbosity, tracebacks=given.tracebacks)
    with shown, sigterm_interrupts() as terminated:
        try:
            return 0 if function(given) else _FAILED
        except BrokenPipeError:
            raise  # the reader of the output closed the pipe; click exits quietly
        except Exception as error:  # unexpected errors, too, are shown without a traceback
            if given.tracebacks and not isinstance(error, Stopped):
                raise
            typer.echo(_message_of(error), err=True)
            if isinstance(error.__cause__, KeyboardInterrupt):
                return 128 + (terminated or [signal.SIGINT])[0]
            if isinstance(error, Stopped):
                return error.status
            return _BAD_INPUT if isinstance(error, ValueError | OSError) else _FAILED
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            return 128 + (terminated or [signal.SIGINT])[0]


def _message_of(error: Exception) -> str:
    if isinstance(error, Stopped):
        return str(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"error: {os.fsdecode(error.filename)}: {error.strerror}"
    if isinstance(error, ValueError | OSError):
        return f"error: {error}"
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and isinstance(cause, Exception):
        causes.append(cause)
    chain = ": ".join(f"{type(each).__name__}: {each}" for each in causes)
    return f"error: {chain} (unexpected; {_TRACEBACK}=1 shows where it was raised)"
