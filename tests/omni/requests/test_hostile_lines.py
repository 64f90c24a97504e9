"""Lines and files that somebody made to end a run: each fails alone, and at once."""

from __future__ import annotations

import errno
import io
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine import SamplingParams, TextPrompt
from omni.requests import request_file as json_lines
from omni.requests.request import OmniRequest
from omni.requests.request_file import RequestError, read_requests

STAGES = {"writer": SamplingParams(), "encoder": None}
GOOD = b'{"request_id": "good", "prompt": "x"}\n'
NAMES_A_FILE = ["prompt_embeds", "audio", "images", "image_url", "beside"]


def line_that_names(key: str, name: str) -> dict[str, Any]:
    match key:
        case "prompt_embeds":
            return {key: name}
        case "image_url":
            part = {"type": "image_url", "image_url": {"url": name}}
            return {"messages": [{"role": "user", "content": [part]}]}
        case "beside":
            return {"images": [name], "prompt": "x"}
    return {key: [name]}


def error_between_good_ones(folder: Path, line: bytes) -> str:
    path = folder / "requests.jsonl"
    path.write_bytes(GOOD + line + b"\n" + GOOD.replace(b"good", b"better"))
    before, error, after = read_requests(path, STAGES)
    assert isinstance(before, OmniRequest) and isinstance(after, OmniRequest)
    assert isinstance(error, RequestError), error
    assert f"{path}:2:" in error.message
    error.message.encode("utf-8")
    return error.message


def make_fifo(file: Path) -> None:
    os.mkfifo(file)


def make_socket(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        before = os.getcwd()
        os.chdir(file.parent)  # an address of a socket is short
        try:
            listener.bind(file.name)
        finally:
            os.chdir(before)


def make_circle(file: Path) -> None:
    file.symlink_to(file.name)


@pytest.mark.parametrize("make", [make_fifo, make_socket, make_circle, Path.mkdir])
@pytest.mark.parametrize("key", NAMES_A_FILE)
def test_what_is_no_regular_file_is_refused_without_opening_it(
    key: str, make: Any, tmp_path: Path
) -> None:
    make(tmp_path / "it")
    message = error_between_good_ones(tmp_path, json.dumps(line_that_names(key, "it")).encode())
    assert "it' cannot be read: " in message


NO_NAMES = {
    "of 300 bytes": "x" * 300,
    "of 300 bytes in a folder": "y/" + "x" * 300,
    "a path of 5,000 bytes": "a/" * 2_500,
    "of a letter of four bytes, 100 times": "\N{MUSICAL SYMBOL G CLEF}" * 100,
    "a NUL": "a\0b",
    "only a NUL": "\0",
    "a folder that is a file": "requests.jsonl/x",
    "nothing but the folder": ".",
    "a device": "/dev/null",
    "absent": "absent",
    "a line break": "a\nb",
}


@pytest.mark.parametrize("name", NO_NAMES)
@pytest.mark.parametrize("key", NAMES_A_FILE)
def test_a_name_that_no_file_has_fails_alone(key: str, name: str, tmp_path: Path) -> None:
    line = json.dumps(line_that_names(key, NO_NAMES[name])).encode()
    message = error_between_good_ones(tmp_path, line)
    assert "cannot be read" in message
    assert len(message) < 1_000


@pytest.mark.parametrize("number", sorted(errno.errorcode))
def test_every_error_of_the_operating_system_fails_alone(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of looking for a file, and of reading it."""
    save_file({"rows": torch.zeros(1, 2)}, tmp_path / "rows.safetensors")
    real = os.stat

    def stat(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if os.fspath(path).endswith("rows.safetensors"):
            raise OSError(number, os.strerror(number), path)
        return real(path, *args, **options)

    def load(path: Any) -> None:
        raise OSError(number, os.strerror(number), path)

    line = json.dumps(line_that_names("prompt_embeds", "rows.safetensors")).encode()
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", stat)
        assert "cannot be read" in error_between_good_ones(tmp_path, line)
    monkeypatch.setattr("safetensors.torch.load_file", load)
    assert "cannot be read" in error_between_good_ones(tmp_path, line)


def test_a_file_of_embeddings_is_measured_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "rows.safetensors").open("wb") as file:
        file.truncate(2**40)  # takes no room on disk
    line = json.dumps(line_that_names("prompt_embeds", "rows.safetensors")).encode()
    message = error_between_good_ones(tmp_path, line)
    assert "it has 1,099,511,627,776 bytes, of at most 536,870,912" in message


LINES = {
    "a number beyond floats": b'{"prompt": "x", "sampling": {"top_p": 1e999}}',
    "a negative number beyond floats": b'{"prompt": "x", "priority": -1e999}',
    "Infinity": b'{"prompt": "x", "priority": Infinity}',
    "an integer of 5,000 digits": b'{"prompt": "x", "priority": ' + b"9" * 5_000 + b"}",
    "more keys than anything has": b"{" + b",".join(b'"k%d":1' % n for n in range(10_001)) + b"}",
    "more values than memory is for": b'{"prompt": [' + b"[]," * 2**21 + b"[]]}",
    "many wrong ids": b'{"prompt_token_ids": [' + b'"x",' * 100_000 + b'"x"]}',
    "a key twice, deep down": b'{"prompt": "x", "sampling": {"writer": {"n": 1, "n": 1}}}',
    "a thousand keys, and one twice": (
        b"{" + b"".join(b'"%d": 0,' % number for number in range(1_000)) + b'"0": 1}'
    ),
    "half a surrogate in a key": b'{"\\udc00": 1}',
    "half a surrogate in a file's name": b'{"audio": ["\\udcff"]}',
    "bytes that are no UTF-8": b'{"prompt": "\xff"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "a second byte order mark": b'\xef\xbb\xbf{"prompt": "x"}',
    "a NUL": b'{"prompt": "x"}\0',
    "a NUL in a string": b'{"prompt": "a\0b"}',
    "two objects": b'{"prompt": "x"} {"prompt": "y"}',
    "a carriage return inside": b'{"prompt":\r "a\rb"}',
    "a vertical tab": b"\x0b{}",
    "a comment": b"# none",
}


@pytest.mark.parametrize("case", LINES)
def test_a_line_that_is_no_request_fails_alone(case: str, tmp_path: Path) -> None:
    message = error_between_good_ones(tmp_path, LINES[case])
    assert len(message) < 1_000
    assert "sys." not in message


@pytest.mark.parametrize("brackets", [(b"[", b"]"), (b'{"a":', b"}")])
def test_any_depth_fails_alone(brackets: tuple[bytes, bytes], tmp_path: Path) -> None:
    """Where one of the parsers that a line goes through gives up, none may end the run."""
    limit = sys.getrecursionlimit()
    opened, closed = brackets
    depths = [*range(1, 40), *range(180, 260), *range(limit - 220, limit + 20), 100_000]
    path = tmp_path / "requests.jsonl"
    lines = [
        b'{"prompt": "x", "sampling": ' + opened * depth + b"1" + closed * depth + b"}"
        for depth in depths
    ]
    path.write_bytes(b"\n".join(lines) + b"\n" + GOOD)
    *errors, good = read_requests(path, STAGES)
    assert len(errors) == len(depths)
    assert all(isinstance(error, RequestError) for error in errors)
    assert all(len(error.message) < 1_000 for error in errors)
    assert isinstance(good, OmniRequest)


def test_a_line_beyond_the_limit_fails_alone_and_is_not_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", 64)
    fits = b'{"request_id": "fits", "prompt": "' + b"x" * 28 + b'"}'
    assert len(fits) == 64
    path = tmp_path / "requests.jsonl"
    seen = bytearray()
    content = b"\n".join([GOOD.strip(), b"[" * 1_000, fits, b"[" * 65, GOOD.strip()])
    path.write_bytes(content)
    good, long, fitting, longer, again = read_requests(path, STAGES, seen.extend)
    assert isinstance(good, OmniRequest) and isinstance(fitting, OmniRequest)
    assert isinstance(again, RequestError), "its id is used already"
    for line, error in ((2, long), (4, longer)):
        assert isinstance(error, RequestError)
        assert f"requests.jsonl:{line}: longer than 64 bytes" in error.message
    assert bytes(seen) == content


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_ends_of_lines_blank_lines_and_a_byte_order_mark_do_not_count(
    end: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + end + GOOD.strip() + end + b"  \t" + end + end + b'{"prompt": "y"}'
    )
    first, second = read_requests(path, STAGES)
    assert isinstance(first, OmniRequest) and isinstance(second, OmniRequest)
    assert second.request_id == "line-5"


def test_a_file_whose_name_is_no_utf8_is_read_and_named(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/f\xff"))
    folder.mkdir()
    path = Path(os.fsdecode(os.fsencode(folder) + b"/r\xfe.jsonl"))
    path.write_bytes(GOOD + b'{"audio": ["absent.wav"]}\n{\n')
    good, absent, bad = read_requests(path, STAGES)
    assert isinstance(good, OmniRequest)
    for error in (absent, bad):
        assert isinstance(error, RequestError)
        assert "\\udcfe.jsonl:" in error.message
        error.message.encode("utf-8")
    absent_file = Path(os.fsdecode(os.fsencode(folder) + b"/\xfd.jsonl"))
    with pytest.raises(ValueError, match="cannot be read: No such file") as raised:
        read_requests(absent_file, STAGES)
    str(raised.value).encode("utf-8")


@pytest.mark.parametrize("path", ["a\0b", "x" * 300, "."])
def test_a_path_that_is_no_file_is_an_error(path: str) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        read_requests(path, STAGES)


def test_the_standard_input_is_a_file_of_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.wav").touch()
    content = GOOD + b'{"audio": ["a.wav"]}\n{\n'
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    good, speech, bad = read_requests("-", STAGES)
    assert isinstance(good, OmniRequest) and isinstance(speech, OmniRequest)
    assert isinstance(bad, RequestError)
    assert bad.message.startswith("standard input:3:2: not valid JSON")


keys = st.sampled_from(
    [
        *("request_id", "prompt", "messages", "prompt_token_ids", "prompt_embeds", "sampling"),
        *("encoder_prompt", "decoder_prompt", "audio", "images", "priority", "cache_salt"),
        *("speaker", "role", "content", "type", "text", "image_url", "url", "input_audio"),
        *("data", "format", "file", "language", "writer", "encoder", "max_tokens", "x", "\\ud800"),
    ]
)
json_text = st.recursive(
    st.sampled_from(
        [
            *("null", "true", "1", "-0", "1e5", "1e999", "NaN", "1" * 30, '""', '"a"', '"../x"'),
            *('"\\u0000"', '"\\ud800"', '"messages"', '"data:,"', '"http://x"', f'"{"x" * 300}"'),
        ]
    ),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda each: "[" + ",".join(each) + "]")
        | st.lists(st.tuples(keys, inner), max_size=3).map(
            lambda pairs: "{" + ",".join(f'"{key}":{value}' for key, value in pairs) + "}"
        )
    ),
    max_leaves=8,
)


@given(lines=st.lists(json_text.map(str.encode) | st.binary(max_size=30), max_size=4))
def test_whatever_a_line_is_the_others_are_read(
    lines: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("lines") / "requests.jsonl"
    junk = [line.replace(b"\n", b" ") for line in lines]
    path.write_bytes(b"\n".join(junk) + b"\n" + GOOD.replace(b"good", b"the good one"))
    *entries, last = read_requests(path, STAGES)
    assert isinstance(last, OmniRequest)
    assert last.prompt == TextPrompt("x")
    junk[:1] = [line.removeprefix(b"\xef\xbb\xbf") for line in junk[:1]]
    assert len(entries) == sum(bool(line.strip()) for line in junk)
    for entry in entries:
        if isinstance(entry, RequestError):
            entry.message.encode("utf-8")
