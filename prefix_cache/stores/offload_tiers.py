"""Offload tiers for the bytes of blocks that the pool may evict: host memory and files on disk.

A file holds one block of one group; its name is derived from everything that determines its bytes::

    path/omni-blocks-1/                closed to other users
        <fingerprint>/                 of weights, types, layout and code
            3f/3f9a...64.block         SHA-256 of the key and the bytes | length | bytes

There is no index that could disagree with the files: a block is found by file name, and a file that
is damaged, truncated or of another key fails its checksum and is removed. A file is written under
a temporary name and then renamed, so several processes can share a folder, and a killed process
leaves no readable partial file. Nothing is synced: after a power loss a file may be damaged, which
is a miss.
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
"""SHA-256 digest of everything that determines a block's bytes."""

_FOLDER = "omni-blocks-1"
_SUFFIX = ".block"
# Padded, so that the data after it is aligned.
_HEADER = struct.Struct("<32sQ8x")
# Maximum bytes queued for the I/O thread; further blocks are dropped, so that no step waits.
_MAX_PENDING_BYTES = 256 * 2**20
# Fractions of the capacity: 1/32 is written between two scans, and a scan trims to 7/8.
_SCANS_PER_CAPACITY, _TRIMMED_FRACTION = 32, 7 / 8
_PAUSE_AFTER_ERROR_S = 10.0
_STALE_AFTER_S = 3600.0
_CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """Counters of the tiers below a pool since their creation, and their current sizes.

    Attributes:
        host_hit_tokens: tokens whose blocks were loaded from host memory.
        disk_hit_tokens: tokens whose blocks were loaded from disk.
        stored: blocks passed to the tiers.
        dropped: blocks not written because the I/O thread was behind or writing failed.
        damaged: files removed because their checksum did not match.
        errors: failed reads and writes, for example on a full disk.
        host_bytes: bytes of blocks in host memory.
        disk_bytes: bytes of all files in the folder, including those of other processes, as of the
            last scan, plus the bytes that this process has written since.
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
        """Return the sum of both; ``disk_bytes`` is the maximum, as replicas may share a folder."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return OffloadStats(**sums | {"disk_bytes": max(self.disk_bytes, other.disk_bytes)})


class HostTier:
    """LRU cache of bytes by key in this process, limited to ``capacity_bytes``."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.nbytes = 0
        self._entries: OrderedDict[TierKey, bytearray] = OrderedDict()

    def __contains__(self, key: TierKey) -> bool:
        return key in self._entries

    def put(self, key: TierKey, data: bytearray) -> None:
        """Store bytes unless they are already stored or exceed the capacity."""
        if key in self._entries or len(data) > self.capacity_bytes:
            return
        while self.nbytes + len(data) > self.capacity_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.nbytes -= len(oldest)
        self._entries[key] = data
        self.nbytes += len(data)

    def get(self, key: TierKey) -> bytearray | None:
        """Return the bytes of a key, or None, and mark them as used."""
        data = self._entries.get(key)
        if data is not None:
            self._entries.move_to_end(key)
        return data


class DiskTier:
    """Bytes by key in files, which concurrent and later processes can use.

    The caller's thread reads. A background thread writes, and removes the least recently used files
    when the folder exceeds its capacity. Every failure is a miss or a dropped block.

    Args:
        path: path of the shared folder; created if it does not exist.
        capacity_bytes: limit on all files together. Processes that share the folder scan it
            periodically: more than four of them may exceed the limit by 1/32 each.
        fingerprint: digest of everything besides the keys that determines the bytes.

    Attributes:
        num_dropped, num_damaged, num_errors: see :class:`OffloadStats`.

    Raises:
        ValueError: if the folder cannot be created, or other users can write to it.
    """

    def __init__(self, path: str | Path, capacity_bytes: int, fingerprint: bytes) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_dropped = self.num_damaged = self.num_errors = 0
        self._root = Path(path).expanduser() / _FOLDER
        self.fingerprint = fingerprint
        self._folder = self._root / fingerprint.hex()[:32]
        # Blocks queued for writing, oldest first; modified only under the condition.
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
        """Queue bytes for writing unless they are already queued, or the queue is full."""
        size = len(data) + _HEADER.size
        if key in self._pending or size > self.capacity_bytes:
            return
        if time.monotonic() < self._paused_until or self._pending_bytes + size > _MAX_PENDING_BYTES:
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
        """Return the bytes of a key exactly as they were written, or None if there are none."""
        pending = self._pending.get(key)
        if pending is not None:
            return pending
        file = self._file(key)
        try:
            with open(file, "rb") as opened:
                data = bytearray(max(0, os.fstat(opened.fileno()).st_size - _HEADER.size))
                header = opened.read(_HEADER.size)
                opened.readinto(data)
            os.utime(file)  # the LRU order
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

    def flush(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> bool:
        """Wait until everything queued is written or dropped; return False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_s)

    def close(self) -> None:
        """Write the queued blocks and stop the thread; blocks beyond the timeout are lost."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)

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
                self._pause(error)
            with self._changed:
                self._pending_bytes -= len(data) + _HEADER.size
                del self._pending[key]
                self._changed.notify_all()

    def _pause(self, error: OSError) -> None:
        """Pause writing after an error, so that a full disk is not retried for every block."""
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
        temporary = f"{file}.{os.getpid()}-{threading.get_ident()}~"
        try:
            os.makedirs(os.path.dirname(file), mode=0o700, exist_ok=True)
            with open(temporary, "wb") as opened:
                opened.write(_header(key, data))
                opened.write(data)
            os.replace(temporary, file)
        except OSError:
            _remove(temporary)
            raise
        self._until_scan -= size
        self.nbytes += size

    def _trim(self) -> None:
        """Scan the folder, and remove the least recently used files if it is too large."""
        found: list[tuple[float, int, str]] = []
        now = time.time()
        for path in iglob(f"{escape(str(self._root))}/*/*/*"):
            try:
                status = os.lstat(path)
            except OSError:
                continue  # another process has removed it
            if path.endswith(_SUFFIX):
                found.append((status.st_mtime, status.st_size, path))
            elif path.endswith("~") and now - status.st_mtime > _STALE_AFTER_S:
                _remove(path)  # left by a killed process
        total, limit = sum(size for _, size, _ in found), self.capacity_bytes * _TRIMMED_FRACTION
        for _, size, path in sorted(found) if total > limit else ():
            if total <= limit:
                break
            _remove(path)
            total -= size
        self.nbytes = total
        self._until_scan = max(self.capacity_bytes // _SCANS_PER_CAPACITY, 1)


def _header(key: TierKey, data: bytearray) -> bytes:
    digest = hashlib.sha256(key)
    digest.update(data)
    return _HEADER.pack(digest.digest(), len(data))


def _remove(path: str) -> None:
    # A file that another process removed is fine, and one that cannot be removed is a miss again.
    with suppress(OSError):
        os.unlink(path)


def _check_owner(folder: Path) -> None:
    """Reject a folder into which another user could write different rows."""
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
