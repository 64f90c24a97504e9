"""Only a regular file of bounded size is opened; what would block or never end is not."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.media.media_source import open_regular_file, regular_file

BOTH = [regular_file, lambda *args, **limits: open_regular_file(*args, **limits).close()]
Check = Callable[..., object]


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    link = tmp_path / "b"
    link.symlink_to(path)
    for each in (path, str(path), link):
        assert regular_file(each, "it", max_bytes=3) == Path(each)
        with open_regular_file(each, "it", max_bytes=3) as file:
            assert file.read() == b"abc"


@pytest.mark.parametrize("check", BOTH)
def test_a_pipe_is_refused_and_not_waited_for(check: Check, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"^audio 'p' cannot be read: it is a named pipe"):
        check(path, "audio 'p'")


@pytest.mark.parametrize("check", BOTH)
@pytest.mark.parametrize("path", ["/dev/zero", "/dev/tty"])
def test_a_device_is_refused(check: Check, path: str) -> None:
    if not os.path.exists(path):
        pytest.skip(f"this machine has no {path}")
    with pytest.raises(ValueError, match="it cannot be read: it is a device"):
        check(path, "it", max_bytes=0)


@pytest.mark.parametrize("check", BOTH)
def test_a_directory_and_a_socket_are_refused(check: Check, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it cannot be read: Is a directory"):
        check(tmp_path, "it")
    # The path of a socket must be short.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as end:
        end.bind(f"{folder}/s")
        with pytest.raises(ValueError, match="it is a socket"):
            check(f"{folder}/s", "it")


WRONG = {
    "missing": ("no/such/file", "No such file or directory"),
    "long": ("x" * 300, "File name too long"),
    "nul": ("a\0b", "null"),
    "a lone surrogate": ("a\ud800", "surrogates not allowed"),
    "nothing": ("", "No such file or directory"),
}


@pytest.mark.parametrize("check", BOTH)
@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_file_is_told_by_name(check: Check, kind: str) -> None:
    path, expected = WRONG[kind]
    with pytest.raises(ValueError, match=f"^it cannot be read: .*{expected}"):
        check(path, "it")


@pytest.mark.parametrize("check", BOTH)
def test_a_large_file_is_refused_with_what_to_raise(check: Check, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(11))
    check(path, "it", max_bytes=11)
    with pytest.raises(ValueError, match="it has 11 bytes, but 10 are the most .*; raise `limit`"):
        check(path, "it", max_bytes=10, setting="`limit`")


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch(mode=0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(ValueError, match="it cannot be read: Permission denied"):
        open_regular_file(path, "it")


def test_what_has_become_a_pipe_since_it_was_looked_at_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, plain = tmp_path / "pipe", tmp_path / "a"
    os.mkfifo(pipe)
    plain.touch()
    looked_at = os.stat(plain)
    monkeypatch.setattr(os, "stat", lambda _: looked_at)
    with pytest.raises(ValueError, match="it is a named pipe"):
        open_regular_file(pipe, "it")
