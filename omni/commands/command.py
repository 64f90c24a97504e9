"""Commands whose arguments and flags are the fields of a dataclass."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from omni.commands.interrupts import exit_status, sigterm_interrupts
from omni.commands.log_lines import shown_log

__all__ = ["CommandOptions", "Stopped", "command"]

_FAILED = 1
"""Exit status of requests that failed or differed, and of what went wrong in between."""
_BAD_INPUT = 2
"""Exit status of what cannot be run as asked."""
_TRACEBACK = "OMNI_TRACEBACK"
"""Set to 1, it shows where every error was raised."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CommandOptions:
    """What every command takes.

    Each field of a subclass is a parameter as typer reads it: ``Annotated[type,
    typer.Option(...)]`` and its default.

    Attributes:
        verbose: how often the flag was given.
        quiet: whether only errors are told.
        debug: whether an error is shown with its traceback.
    """

    verbose: Annotated[
        int,
        typer.Option(
            "--verbose",
            "-v",
            count=True,
            show_default=False,
            metavar="",
            help="Tell what is decided on the way; -vv tells all, with the tracebacks of errors.",
        ),
    ] = 0
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress, no summary, no warnings.")
    ] = False
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False

    @property
    def verbosity(self) -> int:
        """From -1, quiet, to 2."""
        return -1 if self.quiet else min(self.verbose, 2)

    @property
    def tracebacks(self) -> bool:
        """Whether it is to be told where an error was raised."""
        return self.debug or self.verbosity == 2 or os.environ.get(_TRACEBACK) == "1"


class Stopped(Exception):
    """A command ended before its end; the message says what was done.

    Args:
        message: for the user.
        status: of the exit.
    """

    def __init__(self, message: str, status: int = _FAILED) -> None:
        super().__init__(message)
        self.status = status


class _Command(TyperCommand):
    """Tells what is wrong with a value in the words that files and Python are told it in."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read the arguments."""
        try:
            return super().make_context(*args, **kwargs)
        except typer.BadParameter as error:
            from pydantic import ValidationError

            from engine.interface.settings import explain_value_error

            # Newer versions of typer read values with pydantic.
            if isinstance(error.__cause__, ValidationError):
                error.message = explain_value_error(error.__cause__)
            raise


_OptionsT = TypeVar("_OptionsT", bound=CommandOptions)
_LAST = {field.name: place for place, field in enumerate(fields(CommandOptions), start=1)}


def command(
    app: typer.Typer, options: str, *, name: str | None = None
) -> Callable[[Callable[[_OptionsT], bool]], Callable[[_OptionsT], bool]]:
    """Decorator that makes a function a command, which takes its options as one value.

    Whatever goes wrong becomes a line without a traceback, unless one is asked for: a user's
    mistake with exit status 2, everything else with 1.

    Args:
        app: gets the command.
        options: ``"module:name"`` of the command's :class:`CommandOptions`, imported when the
            command is called: the list of commands does not show their flags.
        name: of the command; the function's if it is left out.

    Returns:
        The decorator; its function tells whether all went well, else the exit status is 1.
    """

    def decorate(function: Callable[[_OptionsT], bool]) -> Callable[[_OptionsT], bool]:
        class Listed(TyperCommand):
            def make_context(self, *args: Any, **kwargs: Any) -> Any:
                whole = _with_flags(function, _imported(options))
                return whole.make_context(*args, **kwargs)

        @app.command(name or function.__name__, cls=Listed, help=inspect.getdoc(function))
        def listed() -> None:
            raise AssertionError("the command with its flags is called instead")

        return function

    return decorate


def _imported(options: str) -> type[Any]:
    module, _, name = options.partition(":")
    found: type[Any] = getattr(importlib.import_module(module), name)
    return found


def _with_flags(function: Callable[[_OptionsT], bool], options: type[_OptionsT]) -> Any:
    """The command itself, as typer makes it of a function whose parameters are the options."""
    hints = get_type_hints(options, include_extras=True)

    @functools.wraps(function)
    def run(**values: Any) -> None:
        status = _run(function, options(**values))
        if status:
            raise typer.Exit(status)

    run.__annotations__ = hints
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
                annotation=hints[field.name],
            )
            for field in sorted(fields(options), key=lambda field: _LAST.get(field.name, 0))
        ]
    )
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(cls=_Command)(run)
    return typer.main.get_command(alone)


def _run(function: Callable[[_OptionsT], bool], given: _OptionsT) -> int:
    """Run a command; return its exit status."""
    # A terminal that cannot show a letter must not end a run half-way.
    for stream in (sys.stdout, sys.stderr):
        getattr(stream, "reconfigure", lambda **_: None)(errors="backslashreplace")
    with shown_log(given.verbosity, tracebacks=given.tracebacks), sigterm_interrupts():
        try:
            return 0 if function(given) else _FAILED
        except BrokenPipeError:
            raise  # the reader of the output has seen enough; click ends quietly
        except Exception as error:  # also one that was not foreseen is told without a traceback
            if given.tracebacks and not isinstance(error, Stopped):
                raise
            typer.echo(_told(error), err=True)
            if isinstance(error, Stopped):
                return error.status
            return _BAD_INPUT if isinstance(error, ValueError | OSError) else _FAILED
        except KeyboardInterrupt as interrupt:
            typer.echo("interrupted", err=True)
            return exit_status(interrupt)


def _told(error: Exception) -> str:
    if isinstance(error, Stopped):
        return str(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"error: {os.fsdecode(error.filename)}: {error.strerror}"
    if isinstance(error, ValueError | OSError):
        return f"error: {error}"
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and isinstance(cause, Exception):
        causes.append(cause)
    told = ": ".join(f"{type(each).__name__}: {each}" for each in causes)
    return f"error: {told} (not foreseen; {_TRACEBACK}=1 shows where it was raised)"
