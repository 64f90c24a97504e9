"""Progress bar of a run, with output lines above it."""

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
    """Progress bar on standard error if that is a terminal; otherwise only lines are printed.

    Args:
        total: number of requests; None if it is not known before the end.
        done: number of requests completed by an earlier run.
        shown: if false, the bar is never shown.
    """

    def __init__(self, total: int | None, done: int, *, shown: bool) -> None:
        console = Console(stderr=True)
        self._shown = shown and console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),  # keeps the line within 80 columns
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            _Rate(),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            disable=not self._shown,
            # Lines go to the stream they are written to, even if it is not a terminal.
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,
        )
        self._total, self._done = total, done
        self._task = self._bar.add_task("loading models", total=None)

    def begin(self) -> None:
        """Start counting requests, once the models are loaded."""
        self._bar.reset(self._task, description="requests", total=self._total, completed=self._done)

    def advance(self) -> None:
        """Count one more request as done."""
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
    """Column with the requests per second."""

    def render(self, task: Task) -> Text:
        """Format the column."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.3g}/s")
