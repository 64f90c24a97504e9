"""Reads a file of JSON objects, one a line, in which a bad line fails alone."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

__all__ = ["MAX_KEYS", "MAX_LINE_BYTES", "MAX_LINE_VALUES", "JsonLine", "read_json_lines"]

MAX_LINE_BYTES = 100_000_000
"""Longer lines are not looked at: parsed, they would take several times as much memory."""

MAX_LINE_VALUES = 2**22
"""Commas and brackets of a line: short values take twenty times their characters in memory."""

MAX_KEYS = 10_000
"""Keys of an object."""

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class JsonLine:
    """A line of the file: a JSON object, or what keeps it from being one, and in which column."""

    number: int
    data: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    column: int | None = None


def read_json_lines(
    file: BinaryIO, seen: Callable[[bytes], object] | None = None
) -> Iterator[JsonLine]:
    """Read the lines of a file that are not blank.

    Args:
        file: UTF-8, maybe with a byte order mark; lines end in ``\\n`` or ``\\r\\n``.
        seen: given all bytes of the file, in order.

    Raises:
        OSError: the file cannot be read.
    """
    number = 0
    # Not by splitlines(): a JSON string may hold other line separators than "\n".
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        too_long = len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n")
        if seen is not None:
            seen(raw)
        while too_long and raw and not raw.endswith(b"\n"):
            raw = file.readline(MAX_LINE_BYTES)
            if seen is not None:
                seen(raw)
        if too_long:
            yield JsonLine(number, error=f"longer than {MAX_LINE_BYTES:,} bytes; split the request")
            continue
        raw = raw.removeprefix(_BOM) if number == 1 else raw
        if raw.strip():
            yield _parse(number, raw.removesuffix(b"\n"))


def _parse(number: int, raw: bytes) -> JsonLine:
    if sum(map(raw.count, (b",", b"[", b"{"))) > MAX_LINE_VALUES:
        return JsonLine(number, error=f"more than {MAX_LINE_VALUES:,} values; split the request")
    try:
        data = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_without_duplicates,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
        # Half of a surrogate pair is valid JSON, but no text: it could not be written again.
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
        # Python's own words are on how to have it read such a number all the same.
        endless = "digits" in str(error) and "limit" in str(error)
        reason = "a number in it has too many digits" if endless else error
        return JsonLine(number, error=f"not valid JSON: {reason}")
    if not isinstance(data, dict):
        return JsonLine(number, error="expected a JSON object: {...}")
    return JsonLine(number, data)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise ValueError(f"an object in it has {len(pairs):,} keys, of at most {MAX_KEYS:,}")
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
