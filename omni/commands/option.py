"""Options and arguments of commands, as fields of dataclasses."""

from __future__ import annotations

from dataclasses import MISSING, field
from typing import Any

import typer

PARAMETER = "parameter"
"""What a field's metadata has typer's part of it under."""


def option(help: str, *names: str, default: Any = None, **settings: Any) -> Any:
    """A flag; its names and settings are those of ``typer.Option``."""
    return field(default=default, metadata={PARAMETER: typer.Option(*names, help=help, **settings)})


def argument(help: str, default: Any = MISSING, **settings: Any) -> Any:
    """A positional argument, which must be given if it has no default; see ``typer.Argument``."""
    return field(default=default, metadata={PARAMETER: typer.Argument(help=help, **settings)})
