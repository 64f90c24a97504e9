"""Writes what becomes of requests, each as soon as it is known, so that nothing is lost."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Self

from omni.requests.journal import JOURNAL, Journal, JournalPlace
from omni.requests.output_folder import OutputFolder
from omni.requests.output_line import OutputLines, file_name, files_of
from omni.requests.request import OmniOutput
from omni.requests.run_record import RUN_RECORD, RunRecord

__all__ = ["OUTPUTS", "Existing", "OutputWriter", "file_name"]

OUTPUTS = "outputs.jsonl"


class Existing(Enum):
    """What becomes of outputs that a folder has already."""

    REFUSE = "refuse"
    RESUME = "resume"
    OVERWRITE = "overwrite"


@dataclass(frozen=True, slots=True)
class _Done:
    place: JournalPlace | None
    failed: bool


class OutputWriter:
    """Writes each request's output as soon as it is there, and all in their order in the end.

    ::

        directory/run.json                what is run, to know it again
        directory/outputs.partial.jsonl   a line per request that is done, as they end
        directory/outputs.jsonl           in the end, in the requests' order, in its place
        directory/tensors/, audio/        files that the lines name

    A line is written whole, after the files that it names, and handed to the operating system at
    once: however a run ends, its lines are complete and true. Each is a line of ``outputs.jsonl``
    with the request's ``position`` before it. Nothing is written, and nothing of an earlier run
    removed, before the first request is done.

    Args:
        directory: made if missing, and locked: one run at a time.
        final_output: for each final stage what the user gets of it: ``text``, ``tensors``,
            ``audio``.
        record: what is to be run.
        existing: what to do about outputs in the directory. Those of a run that is resumed are
            kept, but for requests whose files are gone.

    Raises:
        ValueError: there are outputs and ``existing`` refuses them; or they are of something else
            than what is to be resumed, or damaged; or another run writes into the directory.
        OSError: the directory cannot be made or written to.
    """

    def __init__(
        self,
        directory: str | Path,
        final_output: Mapping[str, tuple[str, ...]],
        record: RunRecord,
        existing: Existing = Existing.REFUSE,
    ) -> None:
        self._record = record
        self._folder = OutputFolder(directory)
        self._lines = OutputLines(self._folder, final_output)
        self._journal: Journal | None = None
        self._done: dict[int, _Done] = {}
        self._finished = False
        try:
            self._take_over(existing)
        except BaseException:
            self.close()
            raise

    @property
    def num_done(self) -> int:
        """How many requests have their line, those of the run before included."""
        return len(self._done)

    @property
    def num_failed(self) -> int:
        """How many of these have an error."""
        return sum(done.failed for done in self._done.values())

    @property
    def location(self) -> Path:
        """The file in which the lines are now."""
        return self._folder.path / (OUTPUTS if self._finished else JOURNAL)

    def is_done(self, position: int) -> bool:
        """Whether a request needs not be run."""
        return position in self._done

    def write(self, position: int, output: OmniOutput) -> str | None:
        """Write a finished request's output: its tensors and sounds, then its line.

        Args:
            position: of the request among all, from 0.
            output: what became of it.

        Returns:
            The error in its line, if it has one.

        Raises:
            ValueError: this position has been written, or there is no such request.
            OSError: the disk is full or the like. Of this request nothing is kept.
        """
        if position in self._done:
            raise ValueError(f"the output at position {position} has been written already")
        if not 0 <= position < self._record.num_requests:
            raise ValueError(f"position {position} of {self._record.num_requests} requests")
        journal = self._begun()
        line = {"position": position} | self._lines.line(output)
        place = journal.append(_encoded(line))
        error: str | None = line["error"]
        self._done[position] = _Done(place, error is not None)
        return error

    def finish(self) -> None:
        """Put the lines in the requests' order in ``outputs.jsonl``; the journal goes.

        Raises:
            ValueError: not all requests are done.
            OSError: the disk is full or the like. The journal is whole then.
        """
        missing = self._record.num_requests - self.num_done
        if missing:
            raise ValueError(f"{missing} of {self._record.num_requests} requests are not done")
        if self._finished:
            return
        self._folder.write(OUTPUTS, self._put_in_order)
        self._finished = True
        self._folder.sync()
        self._close_journal()
        self._folder.remove(JOURNAL)

    def close(self) -> None:
        """Let go of the folder. What was written stays."""
        self._close_journal()
        self._folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take_over(self, existing: Existing) -> None:
        journal_size = self._size_of(JOURNAL)
        interrupted, whole = bool(journal_size), self._size_of(OUTPUTS) is not None
        if existing is Existing.OVERWRITE or not (interrupted or whole):
            return
        if existing is Existing.REFUSE:
            mend = "go on with --resume, or " if interrupted else ""
            raise ValueError(
                f"{self._folder.path}: has the outputs of an earlier run"
                f"{', which was cut short' if interrupted else ''}; {mend}replace them with "
                "--overwrite, or give another --output-dir"
            )
        self._check_same_run()
        if interrupted:
            self._resume()
        else:
            self._find_finished()

    def _size_of(self, name: str) -> int | None:
        """Bytes in a file; None if it is not there."""
        try:
            return os.lstat(self._folder.path / name).st_size
        except FileNotFoundError:
            return None

    def _check_same_run(self) -> None:
        path = self._folder.path
        content = self._folder.read(RUN_RECORD)
        if content is None:
            raise ValueError(
                f"{path}: cannot be resumed: there is no {RUN_RECORD} that says what was run; "
                "replace the outputs with --overwrite"
            )
        try:
            differences = self._record.differences(RunRecord.parse(content))
        except ValueError as error:
            raise ValueError(f"{path}: cannot be resumed: {error}") from None
        if differences:
            raise ValueError(
                f"{path}: cannot be resumed, since something else is run now: {differences}. Run "
                "what was run then, replace the outputs with --overwrite, or give another "
                "--output-dir"
            )

    def _resume(self) -> None:
        self._journal = Journal(self._folder)
        for number, (place, content) in enumerate(self._journal.lines(), start=1):
            line = self._parsed(content, JOURNAL, number)
            position = line.pop("position", None)
            if not isinstance(position, int) or not 0 <= position < self._record.num_requests:
                raise self._damaged(JOURNAL, number)
            if all(self._folder.holds(file) for file in files_of(line)):
                self._done[position] = _Done(place, line["error"] is not None)

    def _find_finished(self) -> None:
        lines = (self._folder.read(OUTPUTS) or b"").splitlines(keepends=True)
        for number, content in enumerate(lines, start=1):
            line = self._parsed(content, OUTPUTS, number)
            self._done[number - 1] = _Done(None, line["error"] is not None)
        if len(lines) != self._record.num_requests:
            raise self._damaged(OUTPUTS, len(lines))
        self._finished = True

    def _parsed(self, content: bytes, name: str, number: int) -> dict[str, Any]:
        """Read a line that an earlier run wrote."""
        try:
            line: dict[str, Any] = json.loads(content)
            if not isinstance(line["request_id"], str) or not isinstance(line["error"], str | None):
                raise self._damaged(name, number)
            files = files_of(line)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise self._damaged(name, number) from None
        if not all(isinstance(file, str) for file in files):
            raise self._damaged(name, number)
        return line

    def _damaged(self, name: str, number: int) -> ValueError:
        return ValueError(
            f"{self._folder.path / name}:{number}: cannot be resumed: this is not what a run "
            "wrote; replace the outputs with --overwrite"
        )

    def _begun(self) -> Journal:
        """The journal; the first line of a run clears away what it replaces."""
        if self._journal is None:
            self._folder.remove(OUTPUTS)
            self._folder.remove(JOURNAL)
            content = self._record.model_dump_json(indent=1).encode()
            self._folder.write(RUN_RECORD, lambda file: file.write_bytes(content))
            self._journal = Journal(self._folder)
        return self._journal

    def _put_in_order(self, file: Path) -> None:
        assert self._journal is not None
        with open(file, "wb") as ordered:
            for _, done in sorted(self._done.items()):
                assert done.place is not None
                line = json.loads(self._journal.line_at(done.place))
                del line["position"]
                ordered.write(_encoded(line))
            ordered.flush()
            os.fsync(ordered.fileno())

    def _close_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None


def _encoded(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n"
