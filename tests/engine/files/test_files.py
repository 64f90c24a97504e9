"""Cache entries are complete and built once; untrusted folders, JSON and files are bounded."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from engine.files.disk_cache import CacheFolderError, DiskCache, cache_root
from engine.files.json_file import file_inside, read_json_object
from engine.media.media_source import open_regular_file, regular_file

needs_users = pytest.mark.skipif(
    not hasattr(os, "getuid"), reason="users are known by numbers on POSIX alone"
)


class Builder:
    """Builder that writes two files and counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, folder: Path) -> None:
        self.count += 1
        (folder / "a.txt").write_text("first")
        (folder / "deeper").mkdir()
        (folder / "deeper" / "b.bin").write_bytes(bytes(range(256)))


def whole(folder: Path) -> bool:
    return (folder / "a.txt").read_text() == "first" and (
        folder / "deeper" / "b.bin"
    ).read_bytes() == bytes(range(256))


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path / "cache")


def test_an_entry_is_built_once(cache: DiskCache) -> None:
    build = Builder()
    folders = {cache.entry("one", build) for _ in range(3)}
    assert folders == {cache.root / "one"} and build.count == 1
    assert whole(cache.root / "one")


def test_the_checksums_of_an_entry_are_valid_for_sha256sum(cache: DiskCache) -> None:
    folder = cache.entry("one", Builder())
    done = subprocess.run(
        ["sha256sum", "--check", "SHA256SUMS"], cwd=folder, capture_output=True, text=True
    )
    assert done.stdout == "a.txt: OK\ndeeper/b.bin: OK\n", done.stderr


def _flip(folder: Path) -> None:
    """Change a byte but neither the size nor the modification time."""
    file = folder / "deeper" / "b.bin"
    before = file.stat()
    file.write_bytes(b"\1" + file.read_bytes()[1:])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def _replace_by_link(folder: Path) -> None:
    (folder / "a.txt").rename(folder.parent / "elsewhere")
    (folder / "a.txt").symlink_to(folder.parent / "elsewhere")


def _replace_folder_by_file(folder: Path) -> None:
    folder.rename(folder.parent / "elsewhere")
    folder.write_text("no folder")


HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda folder: os.truncate(folder / "a.txt", 2), "a.txt is damaged"),
    "flipped": (_flip, "b.bin is damaged"),
    "emptied": (lambda folder: (folder / "a.txt").write_bytes(b""), "a.txt is damaged"),
    "file gone": (lambda folder: (folder / "deeper" / "b.bin").unlink(), "deeper/b.bin"),
    "file more": (lambda folder: (folder / "c.py").write_text(""), "c.py"),
    "sums gone": (lambda folder: (folder / "SHA256SUMS").unlink(), "SHA256SUMS"),
    "sums emptied": (lambda folder: (folder / "SHA256SUMS").write_text(""), "a.txt"),
    "sums no text": (lambda folder: (folder / "SHA256SUMS").write_bytes(b"\xff\xfe"), "decode"),
    "sums half": (lambda folder: (folder / "SHA256SUMS").write_text("abc"), "is damaged"),
    "link": (_replace_by_link, "a.txt is no regular file"),
    "no folder": (_replace_folder_by_file, "is no regular file"),
    "open to all": (lambda folder: (folder / "a.txt").chmod(0o666), "a.txt: other users may"),
    "folder open": (lambda folder: folder.chmod(0o777), "one: other users may write"),
}


@pytest.mark.parametrize("harm", HARMS)
@needs_users
def test_a_damaged_entry_is_rebuilt_with_a_warning(
    harm: str, cache: DiskCache, caplog: pytest.LogCaptureFixture
) -> None:
    do, message = HARMS[harm]
    build = Builder()
    do(cache.entry("one", build))
    assert whole(cache.entry("one", build)) and build.count == 2
    (record,) = caplog.records
    assert record.levelname == "WARNING" and message in record.getMessage()
    assert not list(cache.root.glob(".one~*"))
    caplog.clear()
    cache.entry("one", build)
    assert build.count == 2 and not caplog.records


@needs_users
def test_entries_are_not_writable_by_others_under_any_umask(cache: DiskCache) -> None:
    before = os.umask(0)
    try:
        folder = cache.entry("one", Builder())
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o022 for path in (cache.root, folder, *folder.rglob("*"))}
    assert modes == {0}


@needs_users
def test_a_cache_writable_by_others_is_closed_and_rebuilt(
    cache: DiskCache, caplog: pytest.LogCaptureFixture
) -> None:
    build = Builder()
    folder = cache.entry("one", build)
    cache.root.chmod(0o777)
    (folder / "a.txt").chmod(0o666)
    assert cache.entry("one", build) == folder and build.count == 2
    assert cache.root.stat().st_mode & 0o777 == 0o755
    assert "other users could write to the cache" in caplog.text


@needs_users
def test_a_cache_of_another_user_is_refused(
    cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.entry("one", Builder())
    other_user = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other_user)
    with pytest.raises(CacheFolderError, match=r"belongs to another user .* set OMNI_CACHE_DIR"):
        cache.entry("one", Builder())


def test_a_cache_that_cannot_be_written_to_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheFolderError, match=r"cannot be used: .*; set OMNI_CACHE_DIR"):
        DiskCache(tmp_path / "file" / "cache").entry("one", Builder())


def test_a_failed_build_leaves_nothing_and_can_be_retried(cache: DiskCache) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        cache.entry("one", fail)
    assert [path.name for path in cache.root.iterdir()] == [".one.lock"]
    assert whole(cache.entry("one", Builder()))


KILLED = """
import os, signal, sys
from pathlib import Path
from engine.files.disk_cache import DiskCache

def build(folder):
    (folder / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)

DiskCache(Path(sys.argv[1])).entry("one", build)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_the_next_builder_cleans_up_after_a_killed_one(cache: DiskCache) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(cache.root)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert list(cache.root.glob(".one~*"))
    (cache.root / ".one-two~x").mkdir()  # of an entry with the same prefix
    assert whole(cache.entry("one", Builder()))
    left = sorted(path.name for path in cache.root.iterdir())
    assert left == [".one-two~x", ".one.lock", "one"]


RACING = """
import sys
from pathlib import Path
from engine.files.disk_cache import DiskCache

def build(folder):
    with open(sys.argv[2], "a") as log:
        log.write("built\\n")
    for number in range(50):
        (folder / f"{number}").write_bytes(bytes(1000) + bytes([number]))

folder = DiskCache(Path(sys.argv[1])).entry("one", build)
assert sum((folder / f"{number}").read_bytes()[-1] for number in range(50)) == 1225
"""


def test_one_of_several_processes_builds_and_all_find_a_complete_entry(
    cache: DiskCache, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", RACING, str(cache.root), str(log)]
    racers = [subprocess.Popen(command) for _ in range(6)]
    assert [racer.wait() for racer in racers] == [0] * 6
    assert log.read_text() == "built\n"


@pytest.mark.parametrize("reason", [NotImplementedError("no locks here"), OSError(37, "no locks")])
def test_without_file_locks_the_first_to_finish_wins(
    reason: Exception, cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: FileLock, *args: object, **kwargs: object) -> None:
        raise reason

    monkeypatch.setattr(FileLock, "acquire", refuse)
    second = Builder()

    def overtaken(folder: Path) -> None:
        assert whole(cache.entry("one", second))
        Builder()(folder)

    assert whole(cache.entry("one", overtaken)) and second.count == 1
    assert sorted(path.name for path in cache.root.iterdir()) == ["one"]


def test_the_folder_comes_from_the_environment_or_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("OMNI_CACHE_DIR", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.delenv("OMNI_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "omni-pipeline"
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(CacheFolderError, match="no place for a cache.*set OMNI_CACHE_DIR"):
        cache_root()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_text("a")
    (folder / "sub" / "b").write_text("b")
    (tmp_path / "secret").write_text("secret")
    return folder


def test_files_of_a_folder_or_of_a_link_to_it_are_found(folder: Path, tmp_path: Path) -> None:
    (folder / "link").symlink_to("sub/b")
    for name in ("a", "sub/b", "link"):
        assert file_inside(folder, name) == folder / name
    (tmp_path / "short").symlink_to(folder)
    assert file_inside(tmp_path / "short", "a").read_text() == "a"


@pytest.mark.parametrize(
    "name", ["../secret", "sub/../../secret", "/etc/passwd", "..\\secret", "C:\\secret", "a\0b"]
)
def test_names_that_lead_out_are_refused(name: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"lies outside of .*model"):
        file_inside(folder, name)


def test_links_that_lead_out_are_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "relative").symlink_to("../secret")
    (folder / "absolute").symlink_to(tmp_path / "secret")
    (folder / "up").symlink_to(tmp_path)
    for name in ("relative", "absolute", "up/secret"):
        message = rf"model/{name} is a link to .*secret, which lies outside of the folder"
        with pytest.raises(ValueError, match=message):
            file_inside(folder, name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_other_than_regular_files_are_refused(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "dangling").symlink_to("nowhere")
    for name in ("pipe", "sub", "nothing", "dangling"):
        with pytest.raises(ValueError, match=f"{name} is not there, or is no file"):
            file_inside(folder, name)


@pytest.mark.parametrize("blob", ["models--me--mine/blobs/123", "blobs/12/345"])
def test_links_to_the_blobs_of_a_hub_cache_are_followed(blob: str, tmp_path: Path) -> None:
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


def test_a_json_object_may_hold_infinities(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"limits": [0.0, Infinity, -Infinity], "name": "é", "inner": {"a": 1}}')
    expected = {"limits": [0.0, math.inf, -math.inf], "name": "é", "inner": {"a": 1}}
    assert read_json_object(file) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no valid JSON"),
        (b"{", "is no valid JSON"),
        (b'{"a": 1} {"b": 2}', "is no valid JSON"),
        (b'{"a": "\xff"}', "is no valid JSON.*decode"),
        (b"[1]", "must hold a JSON object, got list"),
        (b"null", "must hold a JSON object, got NoneType"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' is there twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is no valid JSON: .*digits"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "is nested too deeply"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "is nested too deeply"),
        (b'{"a": "' + b"x" * 2000 + b'"}', "has 2009 bytes; a file of its kind has at most 1000"),
    ],
)
def test_invalid_json_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(content)
    max_bytes = 1000 if b"xx" in content else 2**20
    with pytest.raises(ValueError, match=rf"a\.json.*{message}"):
        read_json_object(file, most_bytes=max_bytes)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_json_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(ValueError, match=r"a\.json is no regular file"):
        read_json_object(tmp_path / "a.json")


BOTH = [regular_file, lambda *args, **limits: open_regular_file(*args, **limits).close()]
Check = Callable[..., object]


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    link = tmp_path / "b"
    link.symlink_to(path)
    for each in (path, str(path), link):
        assert regular_file(each, "it", max_bytes=3) == Path(each)
        with open_regular_file(each, "it", max_bytes=3) as file:
            assert file.read() == b"abc"


@pytest.mark.parametrize("check", BOTH)
@pytest.mark.parametrize("path", ["/dev/zero", "/dev/tty"])
def test_a_device_is_refused(check: Check, path: str) -> None:
    if not os.path.exists(path):
        pytest.skip(f"this machine has no {path}")
    with pytest.raises(ValueError, match="it cannot be read: it is a device"):
        check(path, "it", max_bytes=0)


@pytest.mark.parametrize("check", BOTH)
def test_a_directory_a_pipe_and_a_socket_are_refused(check: Check, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it cannot be read: Is a directory"):
        check(tmp_path, "it")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"^audio 'p' cannot be read: it is a named pipe"):
        check(tmp_path / "pipe", "audio 'p'")
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
def test_a_missing_file_or_invalid_name_is_an_error(check: Check, kind: str) -> None:
    path, expected = WRONG[kind]
    with pytest.raises(ValueError, match=f"^it cannot be read: .*{expected}"):
        check(path, "it")


@pytest.mark.parametrize("check", BOTH)
def test_the_error_for_a_large_file_names_the_setting(check: Check, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(11))
    check(path, "it", max_bytes=11)
    with pytest.raises(ValueError, match="it has 11 bytes, but 10 are the most .*; raise `limit`"):
        check(path, "it", max_bytes=10, setting="`limit`")


def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch(mode=0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(ValueError, match="it cannot be read: Permission denied"):
        open_regular_file(path, "it")


def test_a_file_replaced_by_a_pipe_after_the_check_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, plain = tmp_path / "pipe", tmp_path / "a"
    os.mkfifo(pipe)
    plain.touch()
    checked = os.stat(plain)
    monkeypatch.setattr(os, "stat", lambda _: checked)
    with pytest.raises(ValueError, match="it is a named pipe"):
        open_regular_file(pipe, "it")
