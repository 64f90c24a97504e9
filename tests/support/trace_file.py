"""The rules of Chrome's trace event format that let viewers show all of a file."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import jsonschema

_NUMBER = {"type": "number", "minimum": 0}
_PLACE = {"pid": {"type": "integer"}, "tid": {"type": "integer"}}
_COMMON = {"name": {"type": "string", "minLength": 1}, "ph": {"type": "string"}, **_PLACE}
_KINDS: dict[str, dict[str, Any]] = {
    "M": {"args": {"type": "object", "minProperties": 1}},
    "X": {"ts": _NUMBER, "dur": _NUMBER, "cat": {"type": "string"}},
    "i": {"ts": _NUMBER, "s": {"const": "t"}, "cat": {"type": "string"}},
    "b": {"ts": _NUMBER, "id": {"type": "string"}, "cat": {"type": "string"}},
    "e": {"ts": _NUMBER, "id": {"type": "string"}, "cat": {"type": "string"}},
}
SCHEMA: dict[str, Any] = {
    "type": "array",
    "items": {
        "oneOf": [
            {
                "type": "object",
                "required": [*_COMMON, *fields],
                "properties": {
                    **_COMMON,
                    **fields,
                    "ph": {"const": kind},
                    "args": {
                        "type": "object",
                        "additionalProperties": {"type": ["string", "number"]},
                    },
                },
                "additionalProperties": False,
            }
            for kind, fields in _KINDS.items()
        ]
    },
}
"""Schema of a whole file; the format is described in "Trace Event Format", by Google."""


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Read a complete file, and check it."""
    events: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))
    check_trace(events)
    return events


def read_prefix(text: str) -> list[dict[str, Any]]:
    """Read the trace of a killed run as viewers do: an array whose end is missing.

    A kill may end a write within an event, at the end of a page of the file.
    """
    assert text.startswith("[")
    prefix = text.rstrip().rstrip(",")
    events: list[dict[str, Any]]
    try:
        events = json.loads(prefix + "]")
    except json.JSONDecodeError:
        events = json.loads(prefix[: prefix.rindex(",\n")] + "]")
    return events


def check_trace(events: list[dict[str, Any]]) -> None:
    """Check the form of every event, that everything begun ends, and that tracks are in order."""
    jsonschema.validate(events, SCHEMA)
    named = {(each["name"], each["pid"], each["tid"]) for each in events if each["ph"] == "M"}
    until: dict[tuple[int, int], float] = defaultdict(float)
    begun: dict[tuple[str, str], dict[str, Any]] = {}
    for each in events:
        track = each["pid"], each["tid"]
        if each["ph"] == "M":
            continue
        assert ("process_name", each["pid"], each["pid"]) in named, each
        assert ("thread_name", *track) in named, each
        # Perfetto takes track 0 for the one with the process's number, and draws both as one.
        assert each["tid"] > 0, "it shares a track with another one"
        match each["ph"]:
            case "b":
                assert begun.setdefault((each["cat"], each["id"]), each) is each, "an id twice"
            case "e":
                begin = begun.pop((each["cat"], each["id"]))
                assert begin["ts"] <= each["ts"]
                assert (begin["pid"], begin["name"]) == (each["pid"], each["name"])
            case _:
                # Numbers are rounded to a thousandth of a microsecond.
                assert each["ts"] >= until[track] - 0.001, "it reaches back on its track"
                until[track] = each["ts"] + each.get("dur", 0.0)
    assert not begun, "what begins ends"


def names_of(events: list[dict[str, Any]], process: str, request_id: str | None) -> list[str]:
    """Return the events of a request's track in a process, or of its steps' track, in order."""
    (pid,) = {
        each["pid"]
        for each in events
        if each["name"] == "process_name" and each["args"]["name"] == process
    }
    wanted = "steps" if request_id is None else request_id
    (tid,) = {
        each["tid"]
        for each in events
        if each["name"] == "thread_name" and each["pid"] == pid and each["args"]["name"] == wanted
    }
    return [
        each["name"]
        for each in events
        if each["ph"] in "Xi" and (each["pid"], each["tid"]) == (pid, tid)
    ]
