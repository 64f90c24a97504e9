"""Where the bytes of blocks are kept that the pool may evict: host memory, and files on disk.

A file holds one block of one group, under a name made of all that determines its bytes::

    path/omni-blocks-1/                closed to other users
        <fingerprint>/                 of weights, types, layout and code
            3f/3f9a...64.block         SHA-256 of the key and what follows | length | bytes

There is no index that could differ from the files: what is there is found by its name, and what is
damaged, cut short or of another key does not match its checksum and is removed. A file is written
under another name and then renamed, so several processes can share a folder, and one that is killed
leaves nothing that could be read. Nothing is synced: after a loss of power a file may be damaged,
which is a miss.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, fields
from glob import escape, iglob
from logging import getLogger
from pathlib import Path

logger = getLogger(f"omni.{__name__}")

TierKey = bytes
"""A SHA-256 digest of all that determines a block's bytes."""

_FOLDER = "omni-blocks-1"
_SUFFIX = ".block"
# Padded, so that what follows is aligned.
_HEADER = struct.Struct("<32sQ8x")
# Bytes that wait for the io thread, beyond which blocks are not kept: a step never waits for it.
_MOST_PENDING = 256 * 2**20
# Shares of the capacity: what is written between two looks at the folder, and what a look leaves.
_BETWEEN_SCANS, _LEFT_BY_SCAN = 32, 7 / 8
_PAUSE_AFTER_ERROR_S = 10.0
_OLD_S = 3600.0
_LONGEST_CLOSE_S = 30.0


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """Counters of the tiers below a pool since they were made, and what they hold now.

    Attributes:
        host_hit_tokens: tokens whose blocks came back from host memory.
        disk_hit_tokens: tokens whose blocks came back from disk.
        stored: blocks handed to the tiers.
        dropped: blocks not written, since the io thread was behind or writing has failed.
        damaged: files that were removed, as their checksum did not match.
        errors: reads and writes that failed, on a full disk say.
        host_bytes: of blocks in host memory.
        disk_bytes: of all files in the folder, those of other processes included, when it was last
            looked through, and what this process has written since.
    """

    host_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    stored: int = 0
    dropped: int = 0
    damaged: int = 0
    errors: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0

    def beside(self, other: OffloadStats) -> OffloadStats:
        """Both together; replicas may share a folder, whose bytes are those that one sees."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return OffloadStats(**sums | {"disk_bytes": max(self.disk_bytes, other.disk_bytes)})


class HostTier:
    """Bytes by key in this process, ``capacity_bytes`` at most, least recently used given up."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.nbytes = 0
        self._entries: OrderedDict[TierKey, bytearray] = OrderedDict()

    def __contains__(self, key: TierKey) -> bool:
        return key in self._entries

    def put(self, key: TierKey, data: bytearray) -> None:
        """Keep bytes, unless they are there or more than fit."""
        if key in self._entries or len(data) > self.capacity_bytes:
            return
        while self.nbytes + len(data) > self.capacity_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.nbytes -= len(oldest)
        self._entries[key] = data
        self.nbytes += len(data)

    def get(self, key: TierKey) -> bytearray | None:
        """The bytes of a key, which count as used now."""
        data = self._entries.get(key)
        if data is not None:
            self._entries.move_to_end(key)
        return data


class DiskTier:
    """Bytes by key in files, which other processes and later ones find.

    The caller's thread reads; a thread of its own writes, and removes the least recently used files
    when the folder holds too much. Every failure is a miss, or a block that is not kept.

    Args:
        path: of the folder that is shared; made if it is not there.
        capacity_bytes: of all files together. Processes that share the folder look at it from time
            to time: more than four of them may exceed this by a 32nd each.
        fingerprint: of everything that determines bytes beside their keys.

    Attributes:
        num_dropped, num_damaged, num_errors: see :class:`OffloadStats`.

    Raises:
        ValueError: the folder cannot be made, or other users can write to it.
    """

    def __init__(self, path: str | Path, capacity_bytes: int, fingerprint: bytes) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_dropped = self.num_damaged = self.num_errors = 0
        self._root = Path(path).expanduser() / _FOLDER
        self.fingerprint = fingerprint
        self._folder = self._root / fingerprint.hex()[:32]
        # What waits to be written, oldest first; changed only under the condition.
        self._pending: dict[TierKey, bytearray] = {}
        self._pending_bytes = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self.nbytes = 0
        self._until_scan = 0
        self._paused_until = 0.0
        self._is_failing = False
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(self._root)
        except OSError as error:
            raise ValueError(f"the offload folder {self._root} cannot be used: {error}") from error

    def __contains__(self, key: TierKey) -> bool:
        return key in self._pending or os.path.exists(self._file(key))

    def put(self, key: TierKey, data: bytearray) -> None:
        """Have bytes written, unless they are there, or too much waits already."""
        size = len(data) + _HEADER.size
        if key in self._pending or size > self.capacity_bytes:
            return
        if time.monotonic() < self._paused_until or self._pending_bytes + size > _MOST_PENDING:
            self.num_dropped += 1
            return
        with self._changed:
            self._pending_bytes += size
            self._pending[key] = data
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._write_all, name="block-offload", daemon=True
            )
            self._thread.start()

    def get(self, key: TierKey) -> bytearray | None:
        """The bytes of a key, whole and as they were written; None if they are not there."""
        pending = self._pending.get(key)
        if pending is not None:
            return pending
        file = self._file(key)
        try:
            with open(file, "rb") as opened:
                data = bytearray(max(0, os.fstat(opened.fileno()).st_size - _HEADER.size))
                header = opened.read(_HEADER.size)
                opened.readinto(data)
            os.utime(file)  # which file was used last
        except FileNotFoundError:
            return None
        except OSError as error:
            self.num_errors += 1
            logger.warning("%s cannot be read, and is computed again: %s", file, error)
            return None
        if header == _header(key, data):
            return data
        self.num_damaged += 1
        logger.warning("%s is damaged: it is removed, and its block computed again", file)
        _remove(file)
        return None

    def flush(self, timeout_s: float = _LONGEST_CLOSE_S) -> bool:
        """Wait until all that was put is written or dropped; False if it takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_s)

    def close(self) -> None:
        """Write what waits, and end the thread; what takes too long is not kept."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_LONGEST_CLOSE_S)

    def _file(self, key: TierKey) -> str:
        name = key.hex()
        return f"{self._folder}/{name[:2]}/{name}{_SUFFIX}"

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._is_closed)
                if not self._pending:
                    return
                key, data = next(iter(self._pending.items()))
            try:
                self._write(key, data)
                self._is_failing = False
            except OSError as error:
                self._note_failure(error)
            with self._changed:
                self._pending_bytes -= len(data) + _HEADER.size
                del self._pending[key]
                self._changed.notify_all()

    def _note_failure(self, error: OSError) -> None:
        """After one, writing pauses: a full disk is not asked for every block."""
        self.num_errors += 1
        self.num_dropped += 1
        self._paused_until = time.monotonic() + _PAUSE_AFTER_ERROR_S
        self._until_scan = 0
        if not self._is_failing:
            logger.warning("blocks are not written to %s for now: %s", self._root, error)
        self._is_failing = True

    def _write(self, key: TierKey, data: bytearray) -> None:
        file, size = self._file(key), len(data) + _HEADER.size
        if os.path.exists(file):
            return
        if self._until_scan < size:
            self._trim()
        aside = f"{file}.{os.getpid()}-{threading.get_ident()}~"
        try:
            os.makedirs(os.path.dirname(file), mode=0o700, exist_ok=True)
            with open(aside, "wb") as opened:
                opened.write(_header(key, data))
                opened.write(data)
            os.replace(aside, file)
        except OSError:
            _remove(aside)
            raise
        self._until_scan -= size
        self.nbytes += size

    def _trim(self) -> None:
        """Look through the folder, and remove what was used least recently if it is too much."""
        found: list[tuple[float, int, str]] = []
        now = time.time()
        for path in iglob(f"{escape(str(self._root))}/*/*/*"):
            try:
                status = os.lstat(path)
            except OSError:
                continue  # another process has removed it
            if path.endswith(_SUFFIX):
                found.append((status.st_mtime, status.st_size, path))
            elif path.endswith("~") and now - status.st_mtime > _OLD_S:
                _remove(path)  # of a process that was killed
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found) if total > self.capacity_bytes * _LEFT_BY_SCAN else ():
            if total <= self.capacity_bytes * _LEFT_BY_SCAN:
                break
            _remove(path)
            total -= size
        self.nbytes = total
        self._until_scan = max(self.capacity_bytes // _BETWEEN_SCANS, 1)


def _header(key: TierKey, data: bytearray) -> bytes:
    digest = hashlib.sha256(key)
    digest.update(data)
    return _HEADER.pack(digest.digest(), len(data))


def _remove(path: str) -> None:
    # What is gone already is as well; what cannot be removed is a miss the next time, too.
    with suppress(OSError):
        os.unlink(path)


def _check_owner(folder: Path) -> None:
    """Refuse a folder into which another user could put other rows."""
    status = folder.stat()
    if not hasattr(os, "getuid"):
        return
    if status.st_uid != os.getuid():
        raise ValueError(
            f"the offload folder {folder} belongs to another user (uid {status.st_uid}), who could "
            "change what is computed; give engine.offload.disk.path a folder of your own"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(
            f"other users may write to the offload folder {folder} (mode "
            f"{stat.S_IMODE(status.st_mode):o}): chmod go-w it"
        )
