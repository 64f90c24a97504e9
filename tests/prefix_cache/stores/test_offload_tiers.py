"""Block files are correct or absent, whatever happens to the folder and its writers."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import prefix_cache.stores.offload_tiers as tiers
from prefix_cache import DiskTier, HostTier
from tests.support.examples import examples
from tests.support.patience import PATIENCE_S

CAPACITY = 40_000
KEYS = st.integers(0, 30)


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def content(number: int) -> bytearray:
    """Return a key's content, 64 to 4,000 bytes."""
    return bytearray(key(number) * (2 + number * 37 % 124))


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.block"))


class SharedFolder(RuleBasedStateMachine):
    """Two users of a folder that is damaged in every way; each block is correct or absent."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.users = [self.new_user(), self.new_user()]
        self.full_disk = False

    def new_user(self) -> DiskTier:
        return DiskTier(self.folder / "tier", CAPACITY, b"f" * 32)

    def teardown(self) -> None:
        vars(tiers).pop("open", None)
        for user in self.users:
            user.close()
        shutil.rmtree(self.folder)

    @rule(user=st.integers(0, 1), number=KEYS)
    def put(self, user: int, number: int) -> None:
        self.users[user].put(key(number), content(number))

    @rule(user=st.integers(0, 1), number=KEYS)
    def get(self, user: int, number: int) -> None:
        found = self.users[user].get(key(number))
        assert found is None or found == content(number)

    @rule(user=st.integers(0, 1), number=KEYS)
    def what_is_written_is_found(self, user: int, number: int) -> None:
        mine = self.users[user]
        mine._paused_until = 0.0
        mine.put(key(number), content(number))
        before = mine.num_dropped
        assert mine.flush(PATIENCE_S)
        if mine.num_dropped == before and files_of(self.folder):
            self.users[1 - user].flush(PATIENCE_S)
            found = self.users[1 - user].get(key(number))
            assert found is None or found == content(number)

    @rule(
        place=st.integers(0, 10**6),
        how=st.sampled_from(["flip", "cut", "empty", "swap", "lengthen", "remove"]),
    )
    def damage(self, place: int, how: str) -> None:
        for user in self.users:
            user.flush(PATIENCE_S)
        files = [file for file in files_of(self.folder) if file.stat().st_size]
        if not files:
            return
        file = files[place % len(files)]
        data = bytearray(file.read_bytes())
        match how:
            case "flip":
                data[place % len(data)] ^= 1 << place % 8
                # The header's padding is not checked.
                if 40 <= place % len(data) < 48:
                    return
            case "cut":
                del data[place % len(data) :]
            case "empty":
                data.clear()
            case "swap":
                data = bytearray(files[(place + 1) % len(files)].read_bytes())
            case "lengthen":
                data += b"more"
            case "remove":
                file.unlink()
                return
        file.write_bytes(data)

    @rule(number=KEYS)
    def leave_what_a_killed_writer_leaves(self, number: int) -> None:
        folder = self.users[0]._file(key(number)).rpartition("/")[0]
        os.makedirs(folder, exist_ok=True)
        Path(f"{self.users[0]._file(key(number))}.1-1~").write_bytes(content(number)[:9])

    @rule()
    def folder_vanishes(self) -> None:
        shutil.rmtree(self.folder / "tier", ignore_errors=True)

    @rule(user=st.integers(0, 1))
    def start_again(self, user: int) -> None:
        self.users[user].close()
        self.users[user] = self.new_user()

    @rule(bytes_left=st.integers(0, 3000))
    def disk_fills_up(self, bytes_left: int) -> None:
        left = [bytes_left]

        class Filling(FileIO):
            def write(self, data: Any) -> int:
                part = memoryview(data)[: left[0]]
                left[0] -= super().write(part)
                if len(part) < len(data):
                    raise OSError(errno.ENOSPC, "No space left on device")
                return len(part)

        vars(tiers)["open"] = lambda file, mode: (Filling if "w" in mode else open)(file, mode)

    @rule()
    def disk_has_room_again(self) -> None:
        vars(tiers).pop("open", None)
        for user in self.users:
            user._paused_until = 0.0

    @invariant()
    def folder_is_bounded(self) -> None:
        sizes = []
        for file in files_of(self.folder):
            with suppress(FileNotFoundError):
                sizes.append(file.stat().st_size)
        assert sum(sizes) <= CAPACITY + 100  # what "lengthen" has added


SharedFolder.TestCase.settings = settings(
    max_examples=examples(30), stateful_step_count=30, deadline=None
)
TestSharedFolder = SharedFolder.TestCase


def test_a_block_is_found_at_once_and_by_other_users(tmp_path: Path) -> None:
    one, other = (DiskTier(tmp_path, CAPACITY, b"f" * 32) for _ in range(2))
    for number in range(5):
        one.put(key(number), content(number))
        assert key(number) in one and one.get(key(number)) == content(number)
    one.close()
    for number in range(5):
        assert key(number) in other and other.get(key(number)) == content(number)
    assert other.get(key(5)) is None


def test_another_fingerprint_finds_nothing(tmp_path: Path) -> None:
    one, other = (DiskTier(tmp_path, CAPACITY, letter * 32) for letter in (b"f", b"g"))
    one.put(key(1), content(1))
    one.close()
    assert other.get(key(1)) is None
    (file,) = files_of(tmp_path)
    os.makedirs(os.path.dirname(other._file(key(2))))
    shutil.copy(file, other._file(key(2)))
    assert other.get(key(2)) is None and other.num_damaged == 1


def test_the_least_recently_used_files_are_removed_first(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 20_000, b"f" * 32)
    data = bytearray(1000)
    for number in range(15):
        tier.put(key(number), data)
        assert tier.flush(PATIENCE_S)
        os.utime(tier._file(key(number)), (1000 + number, 1000 + number))
    assert tier.get(key(0)) == data  # used now
    for number in range(15, 25):
        tier.put(key(number), data)
    assert tier.flush(PATIENCE_S)
    assert key(0) in tier and key(24) in tier
    assert not any(key(number) in tier for number in range(1, 5))
    assert sum(file.stat().st_size for file in files_of(tmp_path)) <= 20_000
    tier.close()


def test_a_full_disk_drops_blocks_and_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    tier = DiskTier(tmp_path, CAPACITY, b"f" * 32)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        for number in range(9):
            tier.put(key(number), content(number))
            tier.flush(PATIENCE_S)
    assert tier.num_dropped == 9 and tier.num_errors == 1
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert not list(tmp_path.rglob("*~"))
    tier._paused_until = 0.0
    tier.put(key(1), content(1))
    tier.close()
    assert tier.get(key(1)) == content(1)


def test_foreign_files_are_never_removed(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "old.block").write_text("mine")
    tier = DiskTier(tmp_path, 5000, b"f" * 32)
    for number in range(30):
        tier.put(key(number), bytearray(1000))
    tier.close()
    assert (tmp_path / "notes.txt").exists() and (tmp_path / "old.block").exists()


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    DiskTier(tmp_path, CAPACITY, b"f" * 32)
    (tmp_path / "omni-blocks-1").chmod(0o770)
    with pytest.raises(ValueError, match="other users may write"):
        DiskTier(tmp_path, CAPACITY, b"f" * 32)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be used"):
        DiskTier(tmp_path / "file", CAPACITY, b"f" * 32)


def test_pending_writes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "_MAX_PENDING_BYTES", 5000)
    monkeypatch.setattr(DiskTier, "_write_all", lambda self: None)  # a disk that hangs
    tier = DiskTier(tmp_path, CAPACITY, b"f" * 32)
    for number in range(10):
        tier.put(key(number), bytearray(1000))
    assert tier.num_dropped == 6 and tier._pending_bytes <= 5000


WRITER = """
import sys
from prefix_cache import DiskTier
from tests.prefix_cache.stores.test_offload_tiers import content, key
tier = DiskTier(sys.argv[1], 2**30, b"f" * 32)
print("ready", flush=True)
for number in range(10**6):
    tier.put(key(number), content(number))
    if number % 50 == 49:
        tier.flush()
"""


def test_killed_writers_leave_only_correct_blocks(tmp_path: Path) -> None:
    """Two processes write the same blocks to one folder until both are killed."""
    for wanted in (40, 400):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
            )
            for _ in range(2)
        ]
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        while len(files_of(tmp_path)) < wanted:
            assert all(writer.poll() is None for writer in writers)
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
    tier = DiskTier(tmp_path, 2**30, b"f" * 32)
    found = 0
    for number in range(len(files_of(tmp_path)) + 200):
        data = tier.get(key(number))
        assert data is None or data == content(number)
        found += data is not None
    assert found == len(files_of(tmp_path)) >= 400 and tier.num_damaged == 0


def test_the_host_tier_evicts_the_least_recently_used_block() -> None:
    host = HostTier(3000)
    for number in range(3):
        host.put(key(number), bytearray(1000))
    assert host.get(key(0)) is not None
    host.put(key(3), bytearray(1000))
    host.put(key(4), bytearray(3001))
    assert [key(number) in host for number in range(5)] == [True, False, True, True, False]
    assert host.nbytes == 3000
