"""Runs ``omni ...`` in this process; writes its input files and reads its output files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from omni.commands.cli import app


def omni(
    *arguments: str | Path,
    stdin: str | None = None,
    status: int | None = None,
    **environment: str,
) -> Result:
    """Run a command; check its exit status if one is given.

    Errors that the command does not turn into a message are raised.
    """
    words = [str(argument) for argument in arguments]
    runner = CliRunner(env=environment or None)
    result = runner.invoke(app, words, input=stdin, catch_exceptions=False)
    assert status in (None, result.exit_code), result.output
    return result


def write_requests(folder: Path, *lines: Any) -> Path:
    """Write ``requests.jsonl``; lines that are strings are written verbatim."""
    path = folder / "requests.jsonl"
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    return path


def read_outputs(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of ``outputs.jsonl``."""
    return [json.loads(line) for line in (folder / "outputs.jsonl").read_text("utf-8").splitlines()]


def outputs_without_times(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of ``outputs.jsonl`` without the times."""
    lines = read_outputs(folder)
    for line in lines:
        for stage in line["stages"].values():
            del stage["metrics"]
    return lines
