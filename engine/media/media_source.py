"""Where the bytes of a picture, a sound or a video come from: a file, a data URL, or the caller."""

from __future__ import annotations

import binascii
from base64 import b64decode
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from engine.media.regular_file import open_regular_file

__all__ = ["MediaSource"]

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
        max_bytes: its largest size.
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
            self._check_size(len(given))
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
        self._check_size(len(data) // 4 * 3 - data[-2:].count("="))
        try:
            return b64decode(data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"{self.name} is a data URL of broken base64: {error}") from error

    def _check_size(self, size: int) -> None:
        if size > self.max_bytes:
            raise ValueError(
                f"{self.name} has {size} bytes, but {self.max_bytes} are the most that are read; "
                f"raise {_SETTING}"
            )
