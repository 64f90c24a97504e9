"""Disk cache of folders that are built once per machine and always complete when used.

::

    root/                        owned by one user, not writable by others
        .<name>.lock             held by the process that builds <name>
        .<name>~x7f2/            temporary folder of an entry that is built or replaced
        <name>/                  an entry: moved here when complete, never changed afterwards
            SHA256SUMS           checksums of all other files; "sha256sum -c" reads it

A building process can be killed at any time: its lock ends with it, and the next process that
acquires the lock removes its temporary folders. Where file locks are not supported, several
processes may build at once; the first to move its folder wins.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.interface.log_fields import package_logger

logger = package_logger(__name__)

_SUMS = "SHA256SUMS"
# Longer than any build takes. After this wait, a process builds concurrently, which is safe.
_LOCK_TIMEOUT_S = 1800.0
_LOCK_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class CacheFolderError(ValueError):
    """Error for an unusable cache folder; the message gives the reason and a remedy."""


def cache_root() -> Path:
    """Return ``$OMNI_CACHE_DIR`` or ``~/.cache/omni-pipeline``; raise ``CacheFolderError``."""
    configured = os.environ.get("OMNI_CACHE_DIR")
    try:
        return Path(configured) if configured else Path.home() / ".cache" / "omni-pipeline"
    except RuntimeError as error:
        raise CacheFolderError(
            f"there is no place for a cache: {error}; set OMNI_CACHE_DIR"
        ) from error


class DiskCache:
    """A folder of entries; see the module docstring.

    An entry is used if its files match their checksums, belong to this user and are not writable
    by others. Otherwise it is rebuilt, and a warning gives the reason.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def entry(self, name: str, build: Callable[[Path], object]) -> Path:
        """Return the folder of an entry; build it if it is missing or was modified.

        Args:
            name: name of the entry; must depend on everything that the content depends on.
            build: fills an empty folder with files; may be called by several processes at once.

        Raises:
            CacheFolderError: the cache's folder belongs to another user, or is not writable.
        """
        folder = self.root / name
        if self._is_private() and _find_problem(folder) is None:
            return folder
        try:
            self._prepare_root()
            with self._lock(name) as is_locked:
                if is_locked:
                    for leftover in self.root.glob(f".{name}~*"):
                        shutil.rmtree(leftover, ignore_errors=True)
                self._build_entry(folder, build)
        except OSError as error:
            raise CacheFolderError(
                f"the cache {self.root} cannot be used: {error}; set OMNI_CACHE_DIR to a folder "
                "that can be written to"
            ) from error
        return folder

    def _is_private(self) -> bool:
        """Return True if the root exists and no other user can write to it."""
        try:
            return _distrust(self.root.stat()) is None
        except OSError:
            return False

    def _prepare_root(self) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.root.stat()
        if not _is_own(status):
            raise CacheFolderError(
                f"the cache {self.root} belongs to another user (uid {status.st_uid}), who could "
                "change what is run from it; set OMNI_CACHE_DIR to a folder of your own"
            )
        if _distrust(status) is not None:
            logger.warning("other users could write to the cache %s: now they cannot", self.root)
            self.root.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS_WRITE)

    @contextmanager
    def _lock(self, name: str) -> Iterator[bool]:
        """Wait for another process that builds an entry; yield True if the lock was acquired."""
        from filelock import FileLock, Timeout  # only here: validating a pipeline builds nothing

        lock = FileLock(self.root / f".{name}.lock", timeout=_LOCK_TIMEOUT_S)
        try:
            lock.acquire()
        except (Timeout, NotImplementedError, OSError) as error:
            # Some network file systems do not support locks.
            if isinstance(error, OSError) and error.errno not in (*_LOCK_UNSUPPORTED, None):
                raise
            logger.warning("%s is built without a lock: %s", name, error)
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def _build_entry(self, folder: Path, build: Callable[[Path], object]) -> None:
        problem = _find_problem(folder)
        if problem is None:
            return
        was_there = os.path.lexists(folder)
        if was_there:
            logger.warning("%s is not used and built again: %s", folder, problem)
        with tempfile.TemporaryDirectory(
            dir=self.root, prefix=f".{folder.name}~", ignore_cleanup_errors=True
        ) as temporary:
            new = Path(temporary, "made")
            new.mkdir()
            logger.info("building %s/%.24s, once", self.root.name, folder.name)
            build(new)
            _seal(new)
            if was_there:
                folder.rename(Path(temporary, "old"))
            try:
                new.rename(folder)
            except OSError:
                # Without a lock, another process may have been first; its content is the same.
                if _find_problem(folder) is not None:
                    raise


# Entries that this process has verified, with the file marks at that time.
_verified: dict[Path, frozenset[tuple[object, ...]]] = {}


def _find_problem(folder: Path) -> str | None:
    """Return the reason why an entry cannot be used; None if it is unmodified.

    All bytes are read once per process, and again if a file has changed since.
    """
    try:
        found = _files(folder)
        marks = frozenset(
            (name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
            for name, status in found.items()
        )
        if _verified.get(folder) == marks:
            return None
        sums = _read_sums(folder / _SUMS)
        if found.keys() - {_SUMS} != sums.keys():
            names = ", ".join(sorted((found.keys() - {_SUMS}) ^ sums.keys()))
            return f"it does not hold the files that were built: {names}"
        for name, digest in sums.items():
            if file_digest(folder / name) != digest:
                return f"{name} is damaged"
    except (OSError, ValueError) as error:
        return str(error)
    _verified[folder] = marks
    return None


def _seal(folder: Path) -> None:
    """Revoke write permission of other users, and write the checksums."""
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    lines = [f"{file_digest(folder / name)}  {name}\n" for name in sorted(_files(folder))]
    (folder / _SUMS).write_text("".join(lines), "utf-8")
    (folder / _SUMS).chmod(0o644)


def _read_sums(file: Path) -> dict[str, str]:
    pairs = [line.split("  ", 1) for line in file.read_text("utf-8").splitlines()]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"{file.name} is damaged")
    return {name: digest for digest, name in pairs}


def _files(folder: Path) -> dict[str, os.stat_result]:
    """Return the files of a folder and its subfolders, by relative path."""
    files: dict[str, os.stat_result] = {}
    for path in (folder, *folder.rglob("*")):
        status = path.lstat()
        reason = _distrust(status)
        if reason is not None:
            raise ValueError(f"{path.name}: {reason}")
        if stat.S_ISREG(status.st_mode) and path != folder:
            files[path.relative_to(folder).as_posix()] = status
        elif not stat.S_ISDIR(status.st_mode):
            raise ValueError(f"{path.name} is no regular file")
    return files


def file_digest(file: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _is_own(status: os.stat_result) -> bool:
    # Windows has no user ids; there, a user's profile is not accessible to others.
    return not hasattr(os, "getuid") or status.st_uid == os.getuid()


def _distrust(status: os.stat_result) -> str | None:
    """Return the reason why another user may have changed a file; None if this is impossible."""
    if not _is_own(status):
        return f"it belongs to another user (uid {status.st_uid})"
    is_writable = status.st_mode & _OTHERS_WRITE and not stat.S_ISLNK(status.st_mode)
    if is_writable and hasattr(os, "getuid"):
        return f"other users may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return None
