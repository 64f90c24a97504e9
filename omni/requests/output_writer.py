"""Writer of request outputs. Each is written as soon as it is finished, so that nothing is lost.

::

    outputs.partial.jsonl   the journal: a line for every finished request, in order of completion
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
from typing import Any, Literal, Self

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
_LOCKS_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of file systems that do not support locks."""


class OutputFolder:
    """A folder that is locked for one run while this object is open.

    Raises:
        ValueError: another run is writing into it.
        OSError: it cannot be created or written to.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        # The lock is released when the process exits, for whatever reason.
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
            if error.errno not in _LOCKS_UNSUPPORTED:
                hint = "give an --output-dir that can be made and written to"
                where = error.filename or str(self.path)
                raise OSError(error.errno, f"{error.strerror}; {hint}", where) from error
            logger.warning(
                "%s: two runs at once would not be noticed: %s", self.path, error.strerror
            )

    def write(self, place: str, write: Callable[[Path], object]) -> None:
        """Write a file atomically.

        It is written under a temporary name, and then moved.

        Raises:
            OSError: for example, the disk is full.
        """
        target = self.path / place
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.partial")
        temporary.unlink(missing_ok=True)  # from a run that was killed
        temporary.touch()
        mode = stat.S_IMODE(temporary.stat().st_mode)
        try:
            write(temporary)
            # Some writers replace the file with a new one that only its owner may read.
            temporary.chmod(mode)
            os.replace(temporary, target)
        except BaseException as error:
            with suppress(OSError):
                temporary.unlink()
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, str(target)) from error
            raise

    def contains(self, place: str) -> bool:
        """Return True if the file exists and is inside the folder."""
        try:
            path = (self.path / place).resolve()
            return path.is_file() and path.is_relative_to(self.path.resolve())
        except (OSError, ValueError):
            return False

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        (self.path / name).unlink(missing_ok=True)

    def sync(self) -> None:
        """Sync the directory to disk, so that the names of the files survive a power loss."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Unlock the folder for other runs. May be called repeatedly."""
        if self._lock.is_locked:
            # Remove the file before the release: the next run must not lock a removed file.
            with suppress(OSError):
                (self.path / _LOCK).unlink()
            self._lock.release()


JOURNAL = "outputs.partial.jsonl"


class _Journal:
    """Append-only file of lines; incomplete lines are removed.

    A line is passed to the operating system before :meth:`append` returns, so that it survives
    any death of this process, but not a power loss.
    """

    def __init__(self, folder: OutputFolder) -> None:
        self._name = str(folder.path / JOURNAL)
        self._descriptor = os.open(self._name, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        self._end = os.fstat(self._descriptor).st_size

    def lines(self) -> Iterator[bytes]:
        """Yield every complete line; then truncate an incomplete last line."""
        self._end = 0
        with open(self._descriptor, "rb", closefd=False) as file:
            file.seek(0)
            for line in file:
                if line.endswith(b"\n"):
                    yield line
                    self._end += len(line)
        os.ftruncate(self._descriptor, self._end)

    def append(self, line: bytes) -> None:
        """Append a line, which ends in a newline, completely or not at all."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except BaseException as error:  # Ctrl-C may also arrive between two writes
            os.ftruncate(self._descriptor, self._end)
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, self._name) from error
            raise
        self._end += len(line)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def describe_stage(
    output: StageOutput,
    wanted: Collection[str],
    *,
    tensor: Callable[[str, Tensor], str],
    sound: Callable[[Waveform], str],
) -> dict[str, Any]:
    """Describe one stage's output as JSON; fields that do not apply are absent.

    Args:
        output: the final output.
        wanted: outputs of the stage that the user gets: ``text``, ``tensors``, ``audio``.
        tensor: returns the path of a tensor with this name, or a description.
        sound: the same for audio.
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
    except SafetensorError as error:  # raised if the disk is full
        raise OSError(errno.EIO, str(error), str(file)) from error


def _files_of(line: Mapping[str, Any]) -> list[str]:
    """Return the files that a line names, as paths relative to the output directory."""
    files = []
    for stage in line["stages"].values():
        files += [*stage.get("tensors", {}).values()]
        files += [stage["audio"]] if "audio" in stage else []
    return files


def file_name(text: str) -> str:
    """Convert any text to one safe and short path component; different texts stay different.

    Plain lower-case names are unchanged. All others (with a slash, a dot, upper case, which some
    file systems do not distinguish, ...) keep their safe characters and end in ``~`` and a hash.
    """
    if re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", text):
        return text
    kept = re.sub(r"[^a-z0-9_-]+", "_", text.lower())[:48].strip("_")
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
    return f"{kept}~{digest.hexdigest()[:16]}"


def _printable(text: str) -> str:
    """Escape the characters that UTF-8 cannot encode: lone surrogates.

    They stand for the bytes of file names that are not UTF-8.
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
    """Return null for the minus infinity of impossible tokens, which JSON cannot express."""
    return value if math.isfinite(value) else None


RUN_RECORD = "run.json"
_MAX_DIFFERENCES = 3
"""Maximum number of differences named in a message; the others are counted."""


class RunRecord(BaseModel):
    """The content of ``run.json``.

    Attributes:
        pipeline: every setting, including defaults and flags, except for where the stages run as
            far as outputs do not depend on it.
        requests: SHA-256, in hexadecimal, of the request file, or of the flags instead of one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    pipeline: Mapping[str, Any]
    requests: str
    num_requests: int

    @classmethod
    def of(cls, pipeline: BaseModel, requests: str, num_requests: int) -> RunRecord:
        """Record a pipeline's configuration; model folders become absolute paths."""
        settings = pipeline.model_dump(mode="json", by_alias=True)
        settings.pop("runtime", None)
        for stage in settings["stages"].values():
            # Devices round differently; the number of workers changes nothing.
            placement = stage.pop("placement", None) or {}
            device = placement.get("devices") or placement.get("device")
            if device is not None:
                stage["placement"] = {"device": device}
            if stage.get("model") and Path(stage["model"]).exists():
                stage["model"] = str(Path(stage["model"]).resolve())
        return cls(pipeline=settings, requests=requests, num_requests=num_requests)

    def differences(self, other: RunRecord) -> str:
        """Describe the differences from an earlier run; empty if there are none."""
        found = list(_differences(other.pipeline, self.pipeline, ""))
        if self.requests != other.requests:
            were, are = other.num_requests, self.num_requests
            found.insert(0, "the requests" + (f": {were} then, {are} now" if were != are else ""))
        more = len(found) - _MAX_DIFFERENCES
        return "; ".join(found[:_MAX_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def _differences(then: Any, now: Any, place: str) -> Iterator[str]:
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys((*then, *now)):
            deeper = f"{place}.{key}" if place else str(key)
            yield from _differences(then.get(key), now.get(key), deeper)
    elif then != now:
        yield f"{place}: {then!r} then, {now!r} now"


OUTPUTS = "outputs.jsonl"


class Existing(Enum):
    """Policy for outputs that already exist in the folder."""

    REFUSE = "refuse"
    RESUME = "resume"
    OVERWRITE = "overwrite"


class OutputWriter:
    """Writes each request's output as soon as it is finished, and all of them in order at the end.

    A line is written atomically, after the files that it names, and passed to the operating system
    at once: however a run ends, its lines are complete and valid. Each is a line of
    ``outputs.jsonl`` preceded by the request's ``position``. Nothing is written, and nothing of an
    earlier run is removed, before the first request is done.

    Args:
        directory: created if missing, and locked: one run at a time.
        final_output: for each final stage the outputs that the user gets: ``text``, ``tensors``,
            ``audio``.
        existing: policy for outputs in the directory. Those of a resumed run are kept, except
            for requests whose files are missing.

    Raises:
        ValueError: there are outputs and ``existing`` refuses them; or they are damaged or those of
            a different run than the resumed one; or another run writes into the directory.
        OSError: the directory cannot be created or written to.
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
        self._done: dict[int, bool] = {}  # by position: true if it failed
        self._finished = False
        try:
            self._open_existing(existing)
        except BaseException:
            self.close()
            raise

    @property
    def num_done(self) -> int:
        """Number of requests with a line, including those of the resumed run."""
        return len(self._done)

    @property
    def num_failed(self) -> int:
        """Number of done requests with an error."""
        return sum(self._done.values())

    @property
    def location(self) -> Path:
        """The file that currently contains the lines."""
        return self._folder.path / (OUTPUTS if self._finished else JOURNAL)

    def is_done(self, position: int) -> bool:
        """Return True if a request need not be run."""
        return position in self._done

    def write(self, position: int, output: OmniOutput) -> str | None:
        """Write a finished request's output: its tensors and audio, then its line.

        Returns:
            The error in its line, if it has one.

        Raises:
            ValueError: this position has been written, or there is no such request.
            OSError: for example, the disk is full. Nothing of this request is kept.
        """
        if position in self._done:
            raise ValueError(f"the output at position {position} has been written already")
        if not 0 <= position < self._record.num_requests:
            raise ValueError(f"position {position} of {self._record.num_requests} requests")
        journal = self._ensure_journal()
        line = {"position": position} | self._write_files(output)
        journal.append(_encoded(line))
        error: str | None = line["error"]
        self._done[position] = error is not None
        return error

    def finish(self) -> None:
        """Write the lines to ``outputs.jsonl`` in the requests' order, and remove the journal.

        Raises:
            ValueError: not all requests are done.
            OSError: for example, the disk is full. The journal stays intact.
        """
        missing = self._record.num_requests - self.num_done
        if missing:
            raise ValueError(f"{missing} of {self._record.num_requests} requests are not done")
        if self._finished:
            return
        self._folder.write(OUTPUTS, self._write_ordered)
        self._finished = True
        self._folder.sync()
        self._close_journal()
        self._folder.remove(JOURNAL)

    def close(self) -> None:
        """Close the journal and unlock the folder."""
        self._close_journal()
        self._folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write_files(self, output: OmniOutput) -> dict[str, Any]:
        """Write the files of an output, and return its line.

        An output that cannot be written, such as audio with samples that are not finite, becomes
        an error of its request.
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

    def _open_existing(self, existing: Existing) -> None:
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
            self._load_finished()

    def _size_of(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if it does not exist."""
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
        for number, content in enumerate(self._journal.lines(), start=1):
            line = self._parsed(content, JOURNAL, number)
            position = line.pop("position", None)
            if not isinstance(position, int) or not 0 <= position < self._record.num_requests:
                raise self._damaged(JOURNAL, number)
            if all(self._folder.contains(file) for file in _files_of(line)):
                self._done[position] = line["error"] is not None

    def _load_finished(self) -> None:
        lines = (self._folder.path / OUTPUTS).read_bytes().splitlines(keepends=True)
        for number, content in enumerate(lines, start=1):
            line = self._parsed(content, OUTPUTS, number)
            self._done[number - 1] = line["error"] is not None
        if len(lines) != self._record.num_requests:
            raise self._damaged(OUTPUTS, len(lines))
        self._finished = True

    def _parsed(self, content: bytes, name: str, number: int) -> dict[str, Any]:
        """Parse a line that an earlier run wrote."""
        try:
            line: dict[str, Any] = json.loads(content)
            texts = [line["request_id"], *_files_of(line)]
            is_valid = isinstance(line["error"], str | None)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise self._damaged(name, number) from None
        if not is_valid or not all(isinstance(text, str) for text in texts):
            raise self._damaged(name, number)
        return line

    def _damaged(self, name: str, number: int) -> ValueError:
        return ValueError(
            f"{self._folder.path / name}:{number}: cannot be resumed: this is not what a run "
            "wrote; replace the outputs with --overwrite"
        )

    def _ensure_journal(self) -> _Journal:
        """Return the journal; the first call of a run removes the outputs that it replaces."""
        if self._journal is None:
            self._folder.remove(OUTPUTS)
            self._folder.remove(JOURNAL)
            content = self._record.model_dump_json(indent=1).encode()
            self._folder.write(RUN_RECORD, lambda file: file.write_bytes(content))
            self._journal = _Journal(self._folder)
        return self._journal

    def _write_ordered(self, file: Path) -> None:
        assert self._journal is not None
        # The last line of a position is the valid one: the files of earlier ones were missing.
        lines = [b""] * self._record.num_requests
        for content in self._journal.lines():
            line = json.loads(content)
            position = line.pop("position")
            lines[position] = _encoded(line)
        with open(file, "wb") as ordered:
            ordered.writelines(lines)
            ordered.flush()
            os.fsync(ordered.fileno())

    def _close_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None


def _encoded(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n"
