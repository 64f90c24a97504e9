"""Opens what strangers name as a file only if it is one: of bounded size, and with an end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

__all__ = ["open_regular_file", "regular_file"]

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
# A pipe would wait for its writer, and a terminal might take the process over.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


def regular_file(
    path: str | Path, name: str, *, max_bytes: int | None = None, setting: str | None = None
) -> Path:
    """Check that a path names a regular file, before anything opens it.

    Opening a pipe blocks until somebody writes to it, and a device such as ``/dev/zero`` never
    ends; a symbolic link is followed.

    Args:
        path: of the file.
        name: of it in messages, such as ``audio 'a.wav'``.
        max_bytes: its largest size; None sets no limit.
        setting: what a user raises to read a larger one.

    Returns:
        The path.

    Raises:
        ValueError: there is no such file, it is of another kind, it is larger, or the path is none.
    """
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        raise _unreadable(name, error) from error
    _check(found, name, max_bytes, setting)
    return Path(path)


def open_regular_file(
    path: str | Path, name: str, *, max_bytes: int | None = None, setting: str | None = None
) -> BinaryIO:
    """Open a file for reading, if it is one; see :func:`regular_file`.

    What was opened is looked at as well: the path may name something else by then.

    Raises:
        ValueError: as there, or it may not be read.
    """
    regular_file(path, name, max_bytes=max_bytes, setting=setting)
    try:
        file = os.fdopen(os.open(path, _FLAGS | getattr(os, "O_BINARY", 0)), "rb")
    except (OSError, ValueError) as error:
        raise _unreadable(name, error) from error
    try:
        _check(os.fstat(file.fileno()), name, max_bytes, setting)
    except BaseException:
        file.close()
        raise
    return file


def _unreadable(name: str, error: Exception) -> ValueError:
    """A path that is no text of the file system raises ``ValueError``, all else ``OSError``."""
    reason = error.strerror if isinstance(error, OSError) else None
    return ValueError(f"{name} cannot be read: {reason or error}")


def _check(found: os.stat_result, name: str, max_bytes: int | None, setting: str | None) -> None:
    kind = stat.S_IFMT(found.st_mode)
    if kind == stat.S_IFDIR:
        raise ValueError(f"{name} cannot be read: {os.strerror(errno.EISDIR)}")
    if kind != stat.S_IFREG:
        what = _KINDS.get(kind, "no regular file")
        raise ValueError(f"{name} cannot be read: it is {what}, and a regular file is wanted")
    if max_bytes is not None and found.st_size > max_bytes:
        mend = f"; raise {setting}" if setting else ""
        raise ValueError(
            f"{name} has {found.st_size} bytes, but {max_bytes} are the most that are read{mend}"
        )
