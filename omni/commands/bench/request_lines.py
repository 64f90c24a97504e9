"""The lines of a file of requests, whatever they are to be sent to."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from omni.commands.bench.load_source import LoadTarget, Send
from omni.requests.json_lines import JsonLine, read_json_lines

__all__ = ["RequestLines"]

_STANDARD_INPUT = "-"


class RequestLines:
    """The lines of a file of requests; read at once, and prepared when it is known for what.

    Args:
        path: the file; ``-`` for the standard input.

    Raises:
        ValueError: it cannot be read, or has no request in it.
    """

    def __init__(self, path: Path) -> None:
        self._name, self._folder = os.fspath(path), path.parent
        if self._name == _STANDARD_INPUT:
            self._name, self._folder = "standard input", Path()
            self._lines = [*read_json_lines(sys.stdin.buffer)]
        else:
            self._lines = self._read(path)
        if not self._lines:
            raise ValueError(f"--input: {self._name}: no request in it")

    def __len__(self) -> int:
        return len(self._lines)

    def prepared(self, target: LoadTarget) -> list[Send]:
        """Make all of them ready to be sent.

        Raises:
            ValueError: lines are wrong or cannot be sent there; all of them are told.
        """
        sends, wrong = [], []
        for line in self._lines:
            try:
                if line.error is not None:
                    raise ValueError(line.error)
                sends.append(target.prepare(line.data, self._folder))
            except (ValueError, RecursionError) as error:
                wrong.append(f"{self._name}:{line.number}: {error}")
        if wrong:
            raise ValueError("\n".join(wrong))
        return sends

    def _read(self, path: Path) -> list[JsonLine]:
        try:
            with open(path, "rb") as file:
                return [*read_json_lines(file)]
        except OSError as error:
            raise ValueError(f"--input: {self._name}: cannot be read: {error.strerror}") from error
