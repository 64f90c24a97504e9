"""JSON of strangers is read within limits, and refused by the name of its file."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from engine.files.json_file import read_json_object


def test_an_object_is_read_with_infinities(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"limits": [0.0, Infinity, -Infinity], "name": "é", "inner": {"a": 1}}')
    assert read_json_object(file) == {
        "limits": [0.0, math.inf, -math.inf],
        "name": "é",
        "inner": {"a": 1},
    }


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is no valid JSON"),
        (b"{", "is no valid JSON"),
        (b'{"a": 1} {"b": 2}', "is no valid JSON"),
        (b'{"a": "\xff"}', "is no valid JSON.*decode"),
        (b"[1]", "must hold a JSON object, got list"),
        (b"null", "must hold a JSON object, got NoneType"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' is there twice"),
        (b'{"a": ' + b"9" * 41 + b"}", "a number has 41 digits"),
        (b'{"a": ' + b"[" * 65 + b"]" * 65 + b"}", "more than 64 levels deep"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "is nested too deeply"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "is nested too deeply"),
        (b'{"a": "' + b"x" * 2000 + b'"}', "has 2009 bytes; a file of its kind has at most 1000"),
    ],
)
def test_what_cannot_be_is_refused(content: bytes, told: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(content)
    most = 1000 if b"xx" in content else 2**20
    with pytest.raises(ValueError, match=rf"a\.json.*{told}"):
        read_json_object(file, most_bytes=most)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(ValueError, match=r"a\.json is no regular file"):
        read_json_object(tmp_path / "a.json")


def test_the_limits_leave_room_for_what_is_published(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"a": ' + "[" * 60 + "]" * 60 + ', "b": ' + "9" * 40 + "}")
    assert read_json_object(file)["b"] == int("9" * 40)
