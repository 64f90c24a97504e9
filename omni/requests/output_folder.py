"""The folder that a run writes into: one run at a time, whole files, and no way out of it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Self

from engine.interface.log_fields import package_logger

__all__ = ["OutputFolder"]

logger = package_logger(__name__)

_LOCK = ".outputs.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""What a file system without locks answers."""


class OutputFolder:
    """A folder that is one run's as long as this object is open.

    It may itself be a symbolic link, since its user named it. Nothing in it is followed that is
    one: what is written stays inside, whatever another program put there.

    Args:
        path: made if missing.

    Raises:
        ValueError: another run is writing into it.
        OSError: it cannot be made or written to.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock: int | None = _locked(self.path / _LOCK)
        except OSError as error:
            mend = "give an --output-dir that can be made and written to"
            where = error.filename or str(self.path)
            raise OSError(error.errno, f"{error.strerror}; {mend}", where) from error

    def write(self, place: str, write: Callable[[Path], object]) -> None:
        """Put a file into the folder: whole, or not at all.

        It is written aside, under a name of its own, and then moved.

        Args:
            place: where, from the folder, with slashes; what is there is replaced.
            write: given the file to fill, which exists and is empty.

        Raises:
            OSError: the disk is full or the like, or a link stands in the way.
        """
        target = self._in_real_folders(PurePosixPath(place))
        aside = target.with_name(f".{target.name}.partial")
        # From a run that was killed. A link of that name is removed, not followed.
        aside.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = os.open(aside, flags, 0o666)
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        os.close(descriptor)
        try:
            write(aside)
            # Some writers put a new file in its place, with permissions for its owner alone.
            aside.chmod(mode)
            os.replace(aside, target)
        except BaseException as error:
            with suppress(OSError):
                aside.unlink()
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, str(target)) from error
            raise

    def read(self, name: str) -> bytes | None:
        """What a file of the folder holds; None if there is no such file.

        Raises:
            OSError: it is a link or no regular file, or cannot be read.
        """
        try:
            descriptor = self.open(name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        with open(descriptor, "rb") as file:
            return file.read()

    def open(self, name: str, flags: int) -> int:
        """Open a regular file that stands in the folder itself.

        Raises:
            OSError: it is a link, or anything else, or cannot be opened.
        """
        path = self.path / name
        # O_NONBLOCK: to open a pipe would wait for a program at its other end.
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            message = "is a symbolic link, which is not followed"
            raise OSError(errno.ELOOP, message, str(path)) from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        return descriptor

    def holds(self, place: str) -> bool:
        """Whether there is such a regular file, reached through no link and not outside."""
        path = PurePosixPath(place)
        if path.is_absolute() or ".." in path.parts:
            return False
        at = self.path
        try:
            for part in path.parts:
                at /= part
                mode = os.lstat(at).st_mode
                if stat.S_ISLNK(mode):
                    return False
        except (OSError, ValueError):
            return False
        return stat.S_ISREG(mode)

    def remove(self, name: str) -> None:
        """Remove a file, or a link, if it is there."""
        (self.path / name).unlink(missing_ok=True)

    def sync(self) -> None:
        """Have the names of the files outlast a loss of power."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Let other runs have the folder. May be called again."""
        if self._lock is not None:
            # Before the lock is let go: a run that gets it must not lock a file that is removed.
            with suppress(OSError):
                (self.path / _LOCK).unlink()
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _in_real_folders(self, place: PurePosixPath) -> Path:
        """Make the folders that lead to a place."""
        at = self.path
        for part in place.parts[:-1]:
            at /= part
            with suppress(FileExistsError):
                at.mkdir()
            if not stat.S_ISDIR(os.lstat(at).st_mode):
                message = (
                    "is a link or a file; a folder is needed there, and links are not followed"
                )
                raise NotADirectoryError(errno.ENOTDIR, message, str(at))
        return at / place.name


def _locked(path: Path) -> int:
    """Open and lock a file, which the process's death unlocks, however it dies.

    Raises:
        ValueError: another process has it.
    """
    import fcntl  # only here: a system without it can still print what it would not write

    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The run that had the lock may have removed the file since it was opened here.
            if _is_same_file(descriptor, path):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise ValueError(
                f"{path.parent}: another run is writing into this folder; wait for it, or give "
                "another --output-dir"
            ) from None
        except OSError as error:
            if error.errno in _NO_LOCKS:
                logger.warning(
                    "%s: two runs at once would not be noticed: %s", path.parent, error.strerror
                )
                return descriptor
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        named = os.lstat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), named)
