"""Untrusted folders and JSON: files are the folder's own, and objects are read within limits."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from engine.files.json_file import file_inside, read_json_object


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_text("a")
    (folder / "sub" / "b").write_text("b")
    (tmp_path / "secret").write_text("secret")
    return folder


def test_files_of_the_folder_are_found(folder: Path) -> None:
    (folder / "link").symlink_to("sub/b")
    for name in ("a", "sub/b", "link"):
        assert file_inside(folder, name) == folder / name


def test_a_folder_may_be_reached_by_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "short").symlink_to(folder)
    assert file_inside(tmp_path / "short", "a").read_text() == "a"


@pytest.mark.parametrize(
    "name", ["../secret", "sub/../../secret", "/etc/passwd", "..\\secret", "C:\\secret", "a\0b"]
)
def test_names_that_lead_out_are_refused(name: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"lies outside of .*model"):
        file_inside(folder, name)


@pytest.mark.parametrize("target", ["../secret", "{tmp}/secret"])
def test_links_that_lead_out_are_refused(target: str, folder: Path, tmp_path: Path) -> None:
    (folder / "link").symlink_to(target.format(tmp=tmp_path))
    with pytest.raises(ValueError, match=r"model/link is a link to .*secret, which lies outside"):
        file_inside(folder, "link")


def test_a_link_through_a_folder_that_leads_out_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "up").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="lies outside of the folder"):
        file_inside(folder, "up/secret")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_is_no_file_is_refused(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "dangling").symlink_to("nowhere")
    for name in ("pipe", "sub", "nothing", "dangling"):
        with pytest.raises(ValueError, match=f"{name} is not there, or is no file"):
            file_inside(folder, name)


@pytest.mark.parametrize("blob", ["models--me--mine/blobs/123", "blobs/12/345"])
def test_in_a_cache_of_the_hub_links_lead_to_its_blobs(blob: str, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--me--mine" / "snapshots" / "0001"
    snapshot.mkdir(parents=True)
    (tmp_path / blob).parent.mkdir(parents=True)
    (tmp_path / blob).write_text("content")
    (tmp_path / "secret").write_text("secret")
    (snapshot / "a").symlink_to(os.path.relpath(tmp_path / blob, snapshot))
    (snapshot / "b").symlink_to("../../../secret")
    assert file_inside(snapshot, "a").read_text() == "content"
    with pytest.raises(ValueError, match="lies outside of the folder"):
        file_inside(snapshot, "b")


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
