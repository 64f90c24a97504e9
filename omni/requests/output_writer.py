"""Writes the outputs of requests, each as soon as it is known, so that nothing is lost.

::

    outputs.partial.jsonl   the journal: a line for every request that is done, as soon as it is
    run.json                the requests and settings that the folder's outputs come from
    outputs.jsonl           all lines in the requests' order, once the run has ended
    tensors/ audio/         the files that lines name, written before them
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeAlias

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from engine import TokenLogprobs, Waveform
from engine.interface.log_fields import package_logger
from omni.requests.request import OmniOutput
from stages import Completion, StageOutput

logger = package_logger(__name__)

_LOCK = ".outputs.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of file systems without locks."""


class OutputFolder:
    """A folder that is one run's as long as this object is open.

    Raises:
        ValueError: another run is writing into it.
        OSError: it cannot be made or written to.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        # The process's death unlocks it, however it dies.
        self._lock = FileLock(
            self.path / _LOCK, timeout=0, thread_local=False, fallback_to_soft=False
        )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except Timeout:
            raise ValueError(
                f"{self.path}: another run is writing into this folder; wait for it, or give "
                "another --output-dir"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                hint = "give an --output-dir that can be made and written to"
                where = error.filename or str(self.path)
                raise OSError(error.errno, f"{error.strerror}; {hint}", where) from error
            logger.warning(
                "%s: two runs at once would not be noticed: %s", self.path, error.strerror
            )

    def write(self, place: str, write: Callable[[Path], object]) -> None:
        """Put a file into the folder: whole, or not at all.

        It is written aside, under a name of its own, and then moved.

        Raises:
            OSError: the disk is full or the like.
        """
        target = self.path / place
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f".{target.name}.partial")
        aside.unlink(missing_ok=True)  # from a run that was killed
        aside.touch()
        mode = stat.S_IMODE(aside.stat().st_mode)
        try:
            write(aside)
            # Some writers put a new file in its place, with permissions for its owner alone.
            aside.chmod(mode)
            os.replace(aside, target)
        except BaseException as error:
            with suppress(OSError):
                aside.unlink()
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, str(target)) from error
            raise

    def holds(self, place: str) -> bool:
        """True if there is such a file, and it is not outside."""
        try:
            path = (self.path / place).resolve()
            return path.is_file() and path.is_relative_to(self.path.resolve())
        except (OSError, ValueError):
            return False

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        (self.path / name).unlink(missing_ok=True)

    def sync(self) -> None:
        """Have the names of the files outlast a loss of power."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Let other runs have the folder. May be called again."""
        if self._lock.is_locked:
            # Before the lock is let go: a run that gets it must not lock a file that is removed.
            with suppress(OSError):
                (self.path / _LOCK).unlink()
            self._lock.release()


JOURNAL = "outputs.partial.jsonl"


_Place: TypeAlias = tuple[int, int]
"""The place of a line in the journal: its first byte, and its length with the line's end."""


class _Journal:
    """Lines that are appended one by one, and of which only whole ones stay.

    A line is handed to the operating system before :meth:`append` returns, so that the death of
    this process, however it comes, loses nothing. What it does not outlast is a loss of power.
    """

    def __init__(self, folder: OutputFolder) -> None:
        self._name = str(folder.path / JOURNAL)
        self._descriptor = os.open(self._name, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        self._end = os.fstat(self._descriptor).st_size

    def lines(self) -> Iterator[tuple[_Place, bytes]]:
        """Every whole line, and where it is; a last one that was cut off is cut away."""
        start = 0
        with open(self._descriptor, "rb", closefd=False) as file:
            file.seek(0)
            for line in file:
                if line.endswith(b"\n"):
                    yield (start, len(line)), line
                    start += len(line)
        os.ftruncate(self._descriptor, start)
        self._end = start

    def append(self, line: bytes) -> _Place:
        """Write a line, which ends in a newline: whole, or not at all."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except BaseException as error:  # a Ctrl-C, too, may come between two pieces
            os.ftruncate(self._descriptor, self._end)
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, self._name) from error
            raise
        place = self._end, len(line)
        self._end += len(line)
        return place

    def line_at(self, place: _Place) -> bytes:
        """A line that was read or appended."""
        start, length = place
        return os.pread(self._descriptor, length, start)

    def close(self) -> None:
        """Close the file, which stays. May be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def describe_stage(
    output: StageOutput,
    wanted: Collection[str],
    *,
    tensor: Callable[[str, Tensor], str],
    sound: Callable[[Waveform], str],
) -> dict[str, Any]:
    """Describe one stage's output; a field that does not apply is absent.

    Args:
        output: in the end.
        wanted: what the user gets of the stage: ``text``, ``tensors``, ``audio``.
        tensor: says where a tensor of a name is, or describes it.
        sound: the same of a sound.
    """
    line: dict[str, Any] = {}
    if "text" in wanted and output.text is not None:
        line["text"] = _printable(output.text)
    if output.text is not None or output.token_ids:
        line["token_ids"] = list(output.token_ids)
    if output.finish_reason is not None:
        line["finish_reason"] = output.finish_reason.value
    if output.encoder_prompt_token_ids is not None:
        line["encoder_prompt_token_ids"] = list(output.encoder_prompt_token_ids)
    line["num_prompt_tokens"] = output.num_prompt_tokens
    line["num_cached_tokens"] = output.num_cached_tokens
    if output.logprobs is not None:
        line["logprobs"] = [_logprobs(entry) for entry in output.logprobs]
    if any(window.token_timestamps for window in output.windows):
        line["windows"] = [
            window._asdict() | {"words": [word._asdict() for word in window.words]}
            for window in output.windows
        ]
    if len(output.completions) > 1:
        line["completions"] = [_completion(each) for each in output.completions]
    if "tensors" in wanted and output.tensors:
        line["tensors"] = {name: tensor(name, rows) for name, rows in output.tensors.items()}
    if "audio" in wanted and output.audio is not None:
        line["audio"] = sound(output.audio)
    line["metrics"] = {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in asdict(output.metrics).items()
        if value is not None
    }
    return line


def _save_tensor(tensors: dict[str, Tensor], file: Path) -> None:
    try:
        save_file(tensors, file)
    except SafetensorError as error:  # what it makes of a full disk
        raise OSError(errno.EIO, str(error), str(file)) from error


def _files_of(line: Mapping[str, Any]) -> list[str]:
    """The files that a line names, as paths from the output directory."""
    files = []
    for stage in line["stages"].values():
        files += [*stage.get("tensors", {}).values()]
        files += [stage["audio"]] if "audio" in stage else []
    return files


def file_name(text: str) -> str:
    """Turn any text into one safe and short part of a path; different texts stay different.

    Plain lower-case names stay as they are. All others keep what can be kept and end in ``~`` and
    a hash: those with a slash, a dot, upper case (some file systems see no difference), ...
    """
    if re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", text):
        return text
    kept = re.sub(r"[^a-z0-9_-]+", "_", text.lower())[:48].strip("_")
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
    return f"{kept}~{digest.hexdigest()[:16]}"


def _printable(text: str) -> str:
    """The same text, with what UTF-8 cannot say escaped: halves of surrogate pairs.

    They stand for the bytes of file names that are no UTF-8.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _completion(completion: Completion) -> dict[str, Any]:
    line: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason and completion.finish_reason.value,
    }
    if completion.logprobs is not None:
        line["logprobs"] = [_logprobs(entry) for entry in completion.logprobs]
    return line


def _logprobs(entry: TokenLogprobs) -> dict[str, Any]:
    return {
        "token_id": entry.token_id,
        "logprob": _number(entry.logprob),
        "top": [[token_id, _number(logprob)] for token_id, logprob in entry.top],
    }


def _number(value: float) -> float | None:
    """Give null for the minus infinity of a token that cannot be: JSON has no such number."""
    return value if math.isfinite(value) else None


RUN_RECORD = "run.json"
_MOST_DIFFERENCES = 3
"""So many are named, and how many more there are."""


class RunRecord(BaseModel):
    """The content of ``run.json``.

    Attributes:
        pipeline: every setting, with its default, and with flags laid over it; but not where the
            stages run, as long as nothing that comes out depends on it.
        requests: SHA-256, in hexadecimal, of the file of requests, or of the flags in its place.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    pipeline: Mapping[str, Any]
    requests: str
    num_requests: int

    @classmethod
    def of(cls, pipeline: BaseModel, requests: str, num_requests: int) -> RunRecord:
        """Record a pipeline's configuration; folders of models as they are found from here."""
        settings = pipeline.model_dump(mode="json", by_alias=True)
        settings.pop("runtime", None)
        for stage in settings["stages"].values():
            # Other devices round differently; how many workers there are changes nothing.
            placement = stage.pop("placement", None) or {}
            device = placement.get("devices") or placement.get("device")
            if device is not None:
                stage["placement"] = {"device": device}
            if stage.get("model") and Path(stage["model"]).exists():
                stage["model"] = str(Path(stage["model"]).resolve())
        return cls(pipeline=settings, requests=requests, num_requests=num_requests)

    def differences(self, other: RunRecord) -> str:
        """Say what is not the same as in another run, the earlier one; nothing if all is."""
        found = list(_differences(other.pipeline, self.pipeline, ""))
        if self.requests != other.requests:
            were, are = other.num_requests, self.num_requests
            found.insert(0, "the requests" + (f": {were} then, {are} now" if were != are else ""))
        more = len(found) - _MOST_DIFFERENCES
        return "; ".join(found[:_MOST_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def _differences(then: Any, now: Any, place: str) -> Iterator[str]:
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys((*then, *now)):
            deeper = f"{place}.{key}" if place else str(key)
            yield from _differences(then.get(key), now.get(key), deeper)
    elif then != now:
        yield f"{place}: {then!r} then, {now!r} now"


OUTPUTS = "outputs.jsonl"


class Existing(Enum):
    """How to treat outputs that a folder has already."""

    REFUSE = "refuse"
    RESUME = "resume"
    OVERWRITE = "overwrite"


class _Done(NamedTuple):
    place: _Place | None
    failed: bool


class OutputWriter:
    """Writes each request's output as soon as it is there, and all in their order in the end.

    A line is written whole, after the files that it names, and handed to the operating system at
    once: however a run ends, its lines are complete and true. Each is a line of ``outputs.jsonl``
    with the request's ``position`` before it. Nothing is written, and nothing of an earlier run
    removed, before the first request is done.

    Args:
        directory: made if missing, and locked: one run at a time.
        final_output: for each final stage what the user gets of it: ``text``, ``tensors``,
            ``audio``.
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
        self._final_output = final_output
        self._journal: _Journal | None = None
        self._done: dict[int, _Done] = {}
        self._finished = False
        try:
            self._take_over(existing)
        except BaseException:
            self.close()
            raise

    @property
    def num_done(self) -> int:
        """Requests that have their line, those of the run before included."""
        return len(self._done)

    @property
    def num_failed(self) -> int:
        """Requests of these that have an error."""
        return sum(done.failed for done in self._done.values())

    @property
    def location(self) -> Path:
        """The file in which the lines are now."""
        return self._folder.path / (OUTPUTS if self._finished else JOURNAL)

    def is_done(self, position: int) -> bool:
        """True if a request need not be run."""
        return position in self._done

    def write(self, position: int, output: OmniOutput) -> str | None:
        """Write a finished request's output: its tensors and sounds, then its line.

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
        line = {"position": position} | self._described(output)
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

    def _described(self, output: OmniOutput) -> dict[str, Any]:
        """The line of an output, whose files are written when this returns.

        An output that has no form on disk, such as a sound with samples that are not finite,
        becomes an error of its request.
        """
        line: dict[str, Any] = {
            "request_id": _printable(output.request_id),
            "error": None if output.error is None else _printable(output.error),
            "stages": {},
        }
        for name in filter(self._final_output.__contains__, output.stages):
            try:
                line["stages"][name] = self._stage(output.stages[name])
            except ValueError as error:
                line["error"] = line["error"] or f"stage {name!r} cannot be written: {error}"
        return line

    def _stage(self, output: StageOutput) -> dict[str, Any]:
        def write(kind: str, ending: str, save: Callable[[Path], object]) -> str:
            place = f"{kind}/{file_name(output.request_id)}/{file_name(output.stage)}{ending}"
            self._folder.write(place, save)
            return place

        def tensor(name: str, rows: Tensor) -> str:
            save = partial(_save_tensor, {name: rows.contiguous()})
            return write("tensors", f".{file_name(name)}.safetensors", save)

        def sound(waveform: Waveform) -> str:
            return write("audio", ".wav", partial(waveform.save, format="wav"))

        wanted = self._final_output[output.stage]
        return describe_stage(output, wanted, tensor=tensor, sound=sound)

    def _take_over(self, existing: Existing) -> None:
        journal_size = self._size_of(JOURNAL)
        interrupted, whole = bool(journal_size), self._size_of(OUTPUTS) is not None
        if existing is Existing.OVERWRITE or not (interrupted or whole):
            return
        if existing is Existing.REFUSE:
            hint = "go on with --resume, or " if interrupted else ""
            raise ValueError(
                f"{self._folder.path}: has the outputs of an earlier run"
                f"{', which was cut short' if interrupted else ''}; {hint}replace them with "
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
        file = path / RUN_RECORD
        if not file.is_file():
            raise ValueError(
                f"{path}: cannot be resumed: there is no {RUN_RECORD} that says what was run; "
                "replace the outputs with --overwrite"
            )
        try:
            earlier = RunRecord.model_validate_json(file.read_bytes())
        except ValidationError:
            raise ValueError(
                f"{path}: cannot be resumed: {RUN_RECORD} is damaged, or of another version"
            ) from None
        if differences := self._record.differences(earlier):
            raise ValueError(
                f"{path}: cannot be resumed, since something else is run now: {differences}. Run "
                "what was run then, replace the outputs with --overwrite, or give another "
                "--output-dir"
            )

    def _resume(self) -> None:
        self._journal = _Journal(self._folder)
        for number, (place, content) in enumerate(self._journal.lines(), start=1):
            line = self._parsed(content, JOURNAL, number)
            position = line.pop("position", None)
            if not isinstance(position, int) or not 0 <= position < self._record.num_requests:
                raise self._damaged(JOURNAL, number)
            if all(self._folder.holds(file) for file in _files_of(line)):
                self._done[position] = _Done(place, line["error"] is not None)

    def _find_finished(self) -> None:
        lines = (self._folder.path / OUTPUTS).read_bytes().splitlines(keepends=True)
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
            files = _files_of(line)
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

    def _begun(self) -> _Journal:
        """The journal; the first line of a run clears away what it replaces."""
        if self._journal is None:
            self._folder.remove(OUTPUTS)
            self._folder.remove(JOURNAL)
            content = self._record.model_dump_json(indent=1).encode()
            self._folder.write(RUN_RECORD, lambda file: file.write_bytes(content))
            self._journal = _Journal(self._folder)
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
