"""Folders that are built once per machine, and are whole whenever they are used.

::

    root/                        of one user, closed to all others
        .<name>.lock             held by who builds <name>
        .<name>~x7f2/            what is being built, or is on its way out
        <name>/                  an entry: moved here when it is whole, never changed afterwards
            SHA256SUMS           of every other file of it; "sha256sum -c" reads it

A process that builds may be killed at any moment without harm: its lock ends with it, and the next
process that takes the lock removes what was left. Where files cannot be locked, several may build
at once; the first to move its folder wins.
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
# Longer than any build takes. Who waited for so long builds beside the other, which is safe.
_LONGEST_WAIT_S = 1800.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class CacheFolderError(ValueError):
    """A cache's folder cannot be used; the message says why and what to do."""


def cache_root() -> Path:
    """``$OMNI_CACHE_DIR``, or ``~/.cache/omni-pipeline``; ``CacheFolderError`` without a home."""
    asked = os.environ.get("OMNI_CACHE_DIR")
    try:
        return Path(asked) if asked else Path.home() / ".cache" / "omni-pipeline"
    except RuntimeError as error:
        why = f"there is no place for a cache: {error}; set OMNI_CACHE_DIR"
        raise CacheFolderError(why) from error


class DiskCache:
    """A folder of entries; see the module's note.

    An entry is used if its files are those that were built, by their checksums, and if they are
    this user's and no other user may write to them. Any other is built again, and a warning says
    why.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def entry(self, name: str, build: Callable[[Path], object]) -> Path:
        """The folder of an entry, built if it is not there or not as it was built.

        Args:
            name: of the entry; it changes with all that what is built depends on.
            build: fills an empty folder with files; may be called by several processes at once.

        Raises:
            CacheFolderError: the cache's folder belongs to another user, or cannot be written to.
        """
        folder = self.root / name
        if self._is_closed() and _problem(folder) is None:
            return folder
        try:
            self._open_root()
            with self._lock(name) as is_alone:
                if is_alone:
                    for left in self.root.glob(f".{name}~*"):
                        shutil.rmtree(left, ignore_errors=True)
                self._make(folder, build)
        except OSError as error:
            raise CacheFolderError(
                f"the cache {self.root} cannot be used: {error}; set OMNI_CACHE_DIR to a folder "
                "that can be written to"
            ) from error
        return folder

    def _is_closed(self) -> bool:
        """Whether the root is there, and no other user can put anything into it."""
        try:
            return _distrust(self.root.stat()) is None
        except OSError:
            return False

    def _open_root(self) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.root.stat()
        if not _is_own(status):
            raise CacheFolderError(
                f"the cache {self.root} belongs to another user (uid {status.st_uid}), who could "
                "change what is run from it; set OMNI_CACHE_DIR to a folder of your own"
            )
        if _distrust(status) is not None:
            logger.warning("other users could write to the cache %s: now they cannot", self.root)
            self.root.chmod(stat.S_IMODE(status.st_mode) & ~_OF_OTHERS)

    @contextmanager
    def _lock(self, name: str) -> Iterator[bool]:
        """Wait for another process that builds an entry; yields whether the lock was had."""
        from filelock import FileLock, Timeout  # only here: validating a pipeline builds nothing

        lock = FileLock(self.root / f".{name}.lock", timeout=_LONGEST_WAIT_S)
        try:
            lock.acquire()
        except (Timeout, NotImplementedError, OSError) as error:
            # Some network file systems know no locks.
            if isinstance(error, OSError) and error.errno not in (*_NO_LOCKS, None):
                raise
            logger.warning("%s is built without a lock: %s", name, error)
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def _make(self, folder: Path, build: Callable[[Path], object]) -> None:
        problem = _problem(folder)
        if problem is None:
            return
        was_there = os.path.lexists(folder)
        if was_there:
            logger.warning("%s is not used and built again: %s", folder, problem)
        with tempfile.TemporaryDirectory(
            dir=self.root, prefix=f".{folder.name}~", ignore_cleanup_errors=True
        ) as aside:
            made = Path(aside, "made")
            made.mkdir()
            logger.info("building %s/%.24s, once", self.root.name, folder.name)
            build(made)
            _seal(made)
            if was_there:
                folder.rename(Path(aside, "old"))
            try:
                made.rename(folder)
            except OSError:
                # Without a lock another may have been first: what it made is the same.
                if _problem(folder) is not None:
                    raise


# What was found as it was built by this process, with the marks of its files at that time.
_known: dict[Path, frozenset[tuple[object, ...]]] = {}


def _problem(folder: Path) -> str | None:
    """What keeps an entry from being used; None if it is as it was built.

    All bytes are read once in a process, and again if a file has changed since.
    """
    try:
        found = _files(folder)
        marks = frozenset(
            (name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
            for name, status in found.items()
        )
        if _known.get(folder) == marks:
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
    _known[folder] = marks
    return None


def _seal(folder: Path) -> None:
    """Take write permission from other users, and write the checksums."""
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
    """The files of a folder by their names in it, those of its folders included."""
    files: dict[str, os.stat_result] = {}
    for path in (folder, *folder.rglob("*")):
        status = path.lstat()
        distrusted = _distrust(status)
        if distrusted is not None:
            raise ValueError(f"{path.name}: {distrusted}")
        if stat.S_ISREG(status.st_mode) and path != folder:
            files[path.relative_to(folder).as_posix()] = status
        elif not stat.S_ISDIR(status.st_mode):
            raise ValueError(f"{path.name} is no regular file")
    return files


def file_digest(file: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _is_own(status: os.stat_result) -> bool:
    # Windows has no such ids; there, a user's profile is closed to others.
    return not hasattr(os, "getuid") or status.st_uid == os.getuid()


def _distrust(status: os.stat_result) -> str | None:
    """Why what has this status may have been changed by another user; None if it cannot."""
    if not _is_own(status):
        return f"it belongs to another user (uid {status.st_uid})"
    if hasattr(os, "getuid") and status.st_mode & _OF_OTHERS and not stat.S_ISLNK(status.st_mode):
        return f"other users may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return None
