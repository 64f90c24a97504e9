"""The file that has a line for every request that is done, as soon as it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from omni.requests.output_folder import OutputFolder

__all__ = ["JOURNAL", "Journal", "JournalPlace"]

JOURNAL = "outputs.partial.jsonl"


@dataclass(frozen=True, slots=True)
class JournalPlace:
    """Where a line stands: its first byte, and its length with the line's end."""

    start: int
    length: int


class Journal:
    """Lines that are appended one by one, and of which only whole ones stay.

    A line is handed to the operating system before :meth:`append` returns, so that the death of
    this process, however it comes, loses nothing. What it does not outlast is a loss of power.

    Args:
        folder: where the file stands; it is made if missing.
    """

    def __init__(self, folder: OutputFolder) -> None:
        self._name = str(folder.path / JOURNAL)
        self._descriptor = folder.open(JOURNAL, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self._end = os.fstat(self._descriptor).st_size

    def lines(self) -> Iterator[tuple[JournalPlace, bytes]]:
        """Every whole line, and where it stands; a last one that was cut off is cut away."""
        start = 0
        with open(self._descriptor, "rb", closefd=False) as file:
            file.seek(0)
            for line in file:
                if line.endswith(b"\n"):
                    yield JournalPlace(start, len(line)), line
                    start += len(line)
        os.ftruncate(self._descriptor, start)
        self._end = start

    def append(self, line: bytes) -> JournalPlace:
        """Write a line, which ends in a newline: whole, or not at all.

        Raises:
            OSError: the disk is full or the like.
        """
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except BaseException as error:  # a Ctrl-C, too, may come between two pieces
            os.ftruncate(self._descriptor, self._end)
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, self._name) from error
            raise
        place = JournalPlace(self._end, len(line))
        self._end += len(line)
        return place

    def line_at(self, place: JournalPlace) -> bytes:
        """A line that was read or appended."""
        return os.pread(self._descriptor, place.length, place.start)

    def close(self) -> None:
        """Close the file, which stays. May be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
