"""Commands whose arguments and flags are the fields of a dataclass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

__all__ = ["CommandOptions", "command"]

_FAILED = 1
"""Exit status of requests that failed or differed."""
_BAD_INPUT = 2
"""Exit status of what cannot be run as asked."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CommandOptions:
    """What every command takes.

    Each field of a subclass is a parameter as typer reads it: ``Annotated[type,
    typer.Option(...)]`` and its default.

    Attributes:
        debug: whether an error is shown with its traceback.
    """

    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False


_OptionsT = TypeVar("_OptionsT", bound=CommandOptions)


def command(
    app: typer.Typer, options: type[_OptionsT]
) -> Callable[[Callable[[_OptionsT], bool]], Callable[[_OptionsT], bool]]:
    """Decorator that makes a function a command, which takes its options as one value.

    A user's mistake becomes one line without a traceback, unless ``debug`` is set.

    Args:
        app: gets the command, under the function's name.
        options: the command's.

    Returns:
        The decorator; its function tells whether all went well, else the exit status is 1.
    """
    hints = get_type_hints(options, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in sorted(fields(options), key=lambda field: field.name == "debug")  # the last
    ]

    def decorate(function: Callable[[_OptionsT], bool]) -> Callable[[_OptionsT], bool]:
        @functools.wraps(function)
        def run(**values: Any) -> None:
            given = options(**values)
            try:
                all_well = function(given)
            except BrokenPipeError:
                raise  # the reader of the output has seen enough; click ends quietly
            except (ValueError, OSError) as error:
                if given.debug:
                    raise
                typer.echo(f"error: {error}", err=True)
                raise typer.Exit(_BAD_INPUT) from error
            if not all_well:
                raise typer.Exit(_FAILED)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = hints
        app.command()(run)
        return function

    return decorate
