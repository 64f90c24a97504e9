"""Sources of the bytes of an image, a sound or a video: a file, a data URL, or the caller."""

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
# Do not wait for the writer of a pipe, nor let a terminal become the controlling one.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


def regular_file(
    path: str | Path, name: str, *, max_bytes: int | None = None, setting: str | None = None
) -> Path:
    """Check that a path names a regular file, before anything opens it.

    Opening a pipe blocks until there is a writer, and a device such as ``/dev/zero`` never ends.
    Symbolic links are followed.

    Args:
        name: the file's name in messages, such as ``audio 'a.wav'``.
        max_bytes: maximum size; None for no limit.
        setting: the setting that a user can raise for larger files.

    Returns:
        The path.

    Raises:
        ValueError: the file does not exist, is not regular or too large, or the path is invalid.
    """
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        raise _unreadable_error(name, error) from error
    _check(found, name, max_bytes, setting)
    return Path(path)


def open_regular_file(
    path: str | Path, name: str, *, max_bytes: int | None = None, setting: str | None = None
) -> BinaryIO:
    """Open a regular file; arguments and errors are those of :func:`regular_file`.

    The opened file is checked again: the path may name another file by then.
    """
    regular_file(path, name, max_bytes=max_bytes, setting=setting)
    try:
        file = os.fdopen(os.open(path, _FLAGS | getattr(os, "O_BINARY", 0)), "rb")
    except (OSError, ValueError) as error:
        raise _unreadable_error(name, error) from error
    try:
        _check(os.fstat(file.fileno()), name, max_bytes, setting)
    except BaseException:
        file.close()
        raise
    return file


def _unreadable_error(name: str, error: Exception) -> ValueError:
    """Build the error of an ``OSError``, or of the ``ValueError`` of an unencodable path."""
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


_MAX_CHARS = 500
"""Maximum characters of a path in messages."""

_SETTING = "engine.media_limits.max_file_bytes"


@dataclass(frozen=True, slots=True)
class MediaSource:
    """A media file, or its content.

    Attributes:
        given: the path of a file; its content; or its content in base64, as a data URL
            (``data:audio/wav;base64,UklGR...``).
        kind: the expected kind, such as ``audio``.
    """

    given: str | Path | bytes
    kind: str
    max_bytes: int

    @property
    def name(self) -> str:
        """Name in messages."""
        if isinstance(self.given, bytes) or self._is_data_url:
            return f"the {self.kind}"
        path = str(self.given)
        return f"{self.kind} {path if len(path) <= _MAX_CHARS else path[:_MAX_CHARS] + '...'!r}"

    def open(self) -> BinaryIO:
        """Open it for reading, as a regular file or in memory.

        Raises:
            ValueError: the file does not exist, is not regular or too large, or the URL is invalid.
        """
        given = self.given
        if isinstance(given, bytes):
            _check_size(len(given), self.name, self.max_bytes, _SETTING)
            return BytesIO(given)
        if self._is_data_url:
            return BytesIO(self._decode(str(given)))
        if isinstance(given, str) and given.lower().startswith(("http://", "https://")):
            raise ValueError(
                f"{self.name} is a web address, and nothing is fetched from there; download it, "
                "and give the file"
            )
        return open_regular_file(given, self.name, max_bytes=self.max_bytes, setting=_SETTING)

    @property
    def _is_data_url(self) -> bool:
        return isinstance(self.given, str) and self.given[:5].lower() == "data:"

    def _decode(self, url: str) -> bytes:
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
