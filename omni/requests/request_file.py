"""Reader of ``requests.jsonl``: one request per line; an invalid line fails alone."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from engine import SamplingParams
from omni.requests.request import OmniRequest
from omni.requests.request_line import (
    FolderFiles,
    example_line,
    parse_line,
    prompt_of,
    sampling_of,
)

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class JsonLine:
    """A line of the file: a JSON object, or the error and its column."""

    number: int
    data: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    column: int | None = None


def read_json_lines(
    file: BinaryIO, seen: Callable[[bytes], object] = lambda _: None
) -> Iterator[JsonLine]:
    """Yield the non-blank lines of a file; ``OSError`` if it cannot be read."""
    # Not splitlines(): a JSON string may contain other line separators than "\n".
    for number, raw in enumerate(file, start=1):
        seen(raw)
        raw = raw.removeprefix(_BOM) if number == 1 else raw
        if raw.strip():
            yield _parse(number, raw.removesuffix(b"\n"))


def _parse(number: int, raw: bytes) -> JsonLine:
    try:
        data = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_without_duplicates,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
        # A lone surrogate is valid JSON, but cannot be encoded: it could not be written again.
        json.dumps(data, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        return JsonLine(number, error=f"not valid JSON: {error.msg}", column=error.colno)
    except UnicodeDecodeError as error:
        return JsonLine(number, error="not valid UTF-8", column=error.start + 1)
    except UnicodeEncodeError:
        return JsonLine(number, error="a string in it has half of a surrogate pair")
    except RecursionError:
        return JsonLine(number, error="not valid JSON: nested too deeply")
    except ValueError as error:
        # Python's own message explains how to raise its limit.
        endless = "digits" in str(error) and "limit" in str(error)
        reason = "a number in it has too many digits" if endless else error
        return JsonLine(number, error=f"not valid JSON: {reason}")
    if not isinstance(data, dict):
        return JsonLine(number, error="expected a JSON object: {...}")
    return JsonLine(number, data)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"key {counts.most_common(1)[0][0]!r} stands twice")
    return data


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number that JSON has")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number[:40]} is too large a number")
    return value


STANDARD_INPUT = "-"
"""Name of a request file that means standard input."""


@dataclass(frozen=True, slots=True)
class RequestError:
    """A line that is not a valid request.

    Attributes:
        line: its number, from 1.
        request_id: that of the line if it can be read, else a generated one.
        message: the error, with file and line.
    """

    line: int
    request_id: str
    message: str


class _InvalidFormError(ValueError):
    """The line does not have a valid form; the message includes an example."""


def read_requests(
    path: str | Path,
    sampling: Mapping[str, SamplingParams | None],
    seen: Callable[[bytes], object] = lambda _: None,
) -> list[OmniRequest | RequestError]:
    """Read a file of requests.

    Args:
        path: the file, UTF-8, one JSON object per line; empty lines are skipped. ``"-"`` is
            standard input. Files that lines name are relative to its folder, or, for standard
            input, to the working directory.
        sampling: every stage's own sampling parameters, which a line overrides field by field;
            None for a stage that does not sample.
        seen: called with all bytes of the file, in order.

    Returns:
        One entry per line, in order; every entry has a request id. An invalid line becomes a
        :class:`RequestError` and does not affect the others.

    Raises:
        ValueError: the file cannot be read, or has no requests.
    """
    name, folder, lines = read_lines(path, seen)
    if not lines:
        raise ValueError(f"{name}: no request in it; a line of it is such as {example_line({})}")
    entries: list[OmniRequest | RequestError] = []
    first_line: dict[str, int] = {}
    for line, request_id in zip(lines, _request_ids(lines), strict=True):
        first = first_line.setdefault(request_id, line.number)
        try:
            if line.error:
                raise _InvalidFormError(line.error)
            if first != line.number:
                raise ValueError(f"request_id: {request_id!r} is already used on line {first}")
            entries.append(make_request(line.data, request_id, folder, sampling))
        except (ValueError, RecursionError) as error:
            at = f"{name}:{line.number}" + (f":{line.column}" if line.column else "")
            entries.append(RequestError(line.number, request_id, f"{at}: {_message(error, line)}"))
    return entries


def read_lines(
    path: str | Path, seen: Callable[[bytes], object] = lambda _: None
) -> tuple[str, Path, list[JsonLine]]:
    """Return the name of a request file, its folder (base of relative paths), and its lines.

    Raises:
        ValueError: the file cannot be read.
    """
    if str(path) == STANDARD_INPUT:
        return "standard input", Path(), list(read_json_lines(sys.stdin.buffer, seen))
    # A path may contain bytes that are not UTF-8, a line of outputs may not.
    name = str(path).encode("utf-8", "backslashreplace").decode("utf-8")
    try:
        with open(path, "rb") as file:
            return name, Path(path).parent, list(read_json_lines(file, seen))
    except OSError as error:
        raise ValueError(f"{name}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # a NUL in the path
        raise ValueError(f"{name!r}: cannot be read: {error}") from error


def _message(error: ValueError | RecursionError, line: JsonLine) -> str:
    if isinstance(error, RecursionError):
        return "not valid JSON: nested too deeply"
    message = str(error).encode("utf-8", "backslashreplace").decode("utf-8")
    if not isinstance(error, _InvalidFormError):
        return message
    return f"{message}; a right line: {example_line(line.data)}"


def _request_ids(lines: Sequence[JsonLine]) -> Iterator[str]:
    """Yield each line's own id, or a generated one that no line has."""
    given = {_given_id(line) for line in lines}
    for line in lines:
        made_up = f"line-{line.number}"
        while made_up in given:
            made_up += "-"
        yield _given_id(line) or made_up


def _given_id(line: JsonLine) -> str | None:
    request_id = line.data.get("request_id")
    return request_id if isinstance(request_id, str) and request_id else None


def make_request(
    data: Mapping[str, Any],
    request_id: str | None,
    folder: Path,
    sampling: Mapping[str, SamplingParams | None],
) -> OmniRequest:
    """Create a request from a line's data; see :func:`read_requests`.

    Raises:
        ValueError: the data is invalid, or names a file that does not exist.
    """
    try:
        line = parse_line(data)
        params = sampling_of(line.sampling, sampling)
    except ValueError as error:
        raise _InvalidFormError(str(error)) from error
    return OmniRequest(
        prompt_of(line, FolderFiles(folder)),
        request_id=request_id,
        sampling=params,
        priority=line.priority,
        cache_salt=line.cache_salt,
        speaker=line.speaker,
    )
