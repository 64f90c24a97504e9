"""A WAV file as it comes, in whatever pieces the network brings it."""

from __future__ import annotations

__all__ = ["WavPieces"]

_LONGEST_HEAD = 1 << 16


class WavPieces:
    """Takes bytes, and counts the seconds of sound in them.

    Files that are written while they are made state a length that means nothing: samples go on to
    the end of what comes.

    Attributes:
        has_sound: whether any has come.
    """

    def __init__(self) -> None:
        self.has_sound = False
        self._head = bytearray()
        self._bytes_per_s = 0

    def feed(self, chunk: bytes) -> float:
        """Take what came.

        Returns:
            Seconds of sound in it.

        Raises:
            ValueError: it is no WAV file.
        """
        num_bytes = len(chunk)
        if not self._bytes_per_s:
            self._head += chunk
            num_bytes = self._after_head()
        if not num_bytes:
            return 0.0
        self.has_sound = True
        return num_bytes / self._bytes_per_s

    def _after_head(self) -> int:
        """Read the head, if all of it is there; how many bytes came behind it."""
        head, place, rate = self._head, 12, 0
        if head[:4] != b"RIFF"[: len(head)] or (len(head) >= 12 and head[8:12] != b"WAVE"):
            raise ValueError(f"it is no WAV file, it begins with {bytes(head[:16])!r}")
        while len(head) >= place + 8:
            name = head[place : place + 4]
            size = int.from_bytes(head[place + 4 : place + 8], "little")
            place += 8
            if name == b"data":
                if not rate:
                    raise ValueError("it says nothing of its samples before they come")
                self._bytes_per_s = rate
                return len(head) - place
            if name == b"fmt " and len(head) >= place + 12:
                rate = int.from_bytes(head[place + 8 : place + 12], "little")
            place += size + size % 2
        if len(head) > _LONGEST_HEAD:
            raise ValueError(f"it has no samples in its first {_LONGEST_HEAD} bytes")
        return 0
