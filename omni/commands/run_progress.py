"""A bar that shows how far a run is and what is left, with lines between."""

from __future__ import annotations

import sys
from typing import Self

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class RunProgress:
    """A bar on the standard error, where a person looks on; elsewhere only the lines come.

    Args:
        total: how many requests there are; None where that is not known before the end.
        done: how many of them an earlier run did.
        shown: whether a bar is wanted at all.
    """

    def __init__(self, total: int | None, done: int, *, shown: bool) -> None:
        console = Console(stderr=True)
        self._shown = shown and console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),  # the line shall fit 80 letters
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            _Rate(),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            disable=not self._shown,
            # Lines go where they are sent, also where that is no terminal.
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,
        )
        self._total, self._done = total, done
        self._task = self._bar.add_task("loading models", total=None)

    def begin(self) -> None:
        """The models are loaded; from now on requests are counted."""
        self._bar.reset(self._task, description="requests", total=self._total, completed=self._done)

    def advance(self) -> None:
        """One more request is done."""
        self._bar.advance(self._task)

    def echo(self, line: str, *, err: bool = False) -> None:
        """Print a line above the bar."""
        hides = self._shown and (err or sys.stdout.isatty())
        if hides:
            self._bar.stop()
        typer.echo(line, err=err)
        if hides:
            self._bar.start()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class _Rate(ProgressColumn):
    """Requests in a second."""

    def render(self, task: Task) -> Text:
        """Write the column."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.3g}/s")
