"""Where the bytes of a picture, a sound or a video come from: a file, a data URL, or the caller."""

from __future__ import annotations

import binascii
import errno
import os
import stat
from base64 import b64decode
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

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
    """Open a regular file; arguments and errors are those of :func:`regular_file`.

    What was opened is looked at as well: the path may name something else by then.
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
    if max_bytes is not None:
        _check_size(found.st_size, name, max_bytes, setting)


def _check_size(size: int, name: str, max_bytes: int, setting: str | None) -> None:
    if size > max_bytes:
        fix = f"; raise {setting}" if setting else ""
        raise ValueError(
            f"{name} has {size} bytes, but {max_bytes} are the most that are read{fix}"
        )


_LONGEST = 500
"""Characters of a path that messages show."""

_SETTING = "engine.media_limits.max_file_bytes"


@dataclass(frozen=True, slots=True)
class MediaSource:
    """A file of a kind, or what stands in its place.

    Attributes:
        given: the path of a file; its content; or its content in base64, as a data URL
            (``data:audio/wav;base64,UklGR...``).
        kind: what it is taken for, in a word.
    """

    given: str | Path | bytes
    kind: str
    max_bytes: int

    @property
    def name(self) -> str:
        """What messages call it."""
        if isinstance(self.given, bytes) or self._is_data_url:
            return f"the {self.kind}"
        path = str(self.given)
        return f"{self.kind} {path if len(path) <= _LONGEST else path[:_LONGEST] + '...'!r}"

    def open(self) -> BinaryIO:
        """Open it for reading; it is a regular file, or lies in memory.

        Raises:
            ValueError: there is no such file, it is none, it is too large, or the URL is wrong.
        """
        given = self.given
        if isinstance(given, bytes):
            _check_size(len(given), self.name, self.max_bytes, _SETTING)
            return BytesIO(given)
        if self._is_data_url:
            return BytesIO(self._decoded(str(given)))
        if isinstance(given, str) and given.lower().startswith(("http://", "https://")):
            raise ValueError(
                f"{self.name} is a web address, and nothing is fetched from there; download it, "
                "and give the file"
            )
        return open_regular_file(given, self.name, max_bytes=self.max_bytes, setting=_SETTING)

    @property
    def _is_data_url(self) -> bool:
        return isinstance(self.given, str) and self.given[:5].lower() == "data:"

    def _decoded(self, url: str) -> bytes:
        head, comma, data = url.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise ValueError(
                f"{self.name} is a data URL that is not base64; it must begin like "
                f"'data:{self.kind}/...;base64,'"
            )
        size = len(data) // 4 * 3 - data[-2:].count("=")
        _check_size(size, self.name, self.max_bytes, _SETTING)
        try:
            return b64decode(data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"{self.name} is a data URL of broken base64: {error}") from error
