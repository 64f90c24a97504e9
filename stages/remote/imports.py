"""What a process has got from a peer."""

from __future__ import annotations

import functools
import os
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

from stages.remote.doorbell import Doorbell
from stages.remote.segment import Segment
from stages.remote.segments import SharedBytes

__all__ = ["NUMBER", "Imports", "announcement"]

NUMBER = struct.Struct("<Q")
"""How the number of an export is told."""

_ANNOUNCED = struct.Struct("<16sQ")


class Imports:
    """The segments that a peer has announced, and what of them was let go of here.

    Args:
        doorbell: rung when something was let go of.

    Attributes:
        nbytes: of all that was handed over so far.
    """

    def __init__(self, doorbell: Doorbell) -> None:
        self._doorbell = doorbell
        self._segments: dict[bytes, Segment] = {}
        self._released: deque[int] = deque()
        self.nbytes = 0

    def announce(self, content: bytes, fds: Sequence[int]) -> None:
        """Take segments in.

        Raises:
            ValueError: they are not as announced. All descriptors are closed.
        """
        left = list(fds)
        try:
            if len(content) != len(fds) * _ANNOUNCED.size:
                raise ValueError(f"{len(content)} bytes announce {len(fds)} segments")
            for identity, size in _ANNOUNCED.iter_unpack(content):
                if identity in self._segments:
                    raise ValueError("a segment was announced twice")
                self._segments[identity] = Segment(identity, left.pop(0), size)
        finally:
            for fd in left:
                os.close(fd)

    def find(self, reference: Any) -> SharedBytes:
        """What stands for bytes in a message; see :data:`stages.remote.codec.Find`.

        Raises:
            ValueError: it stands for nothing.
        """
        match reference:
            case [int() as number, bytes() as identity, int() as offset, int() as nbytes]:
                segment = self._segments.get(identity)
            case _:
                raise ValueError(f"no reference: {reference!r:.80}")
        if segment is None:
            raise ValueError("it speaks of a segment that was not announced")
        self.nbytes += nbytes
        release = functools.partial(_release, self._released, number, self._doorbell)
        return SharedBytes(segment, offset, nbytes, release)

    def drop(self, content: bytes) -> None:
        """Forget segments; what lies in them stays for as long as somebody has it.

        Raises:
            ValueError: there is no such segment.
        """
        for start in range(0, len(content), 16):
            if self._segments.pop(content[start : start + 16], None) is None:
                raise ValueError("a segment was dropped that was not announced")

    def releases(self) -> bytes:
        """The numbers of what was let go of, once; :meth:`Exports.release` of the peer takes it."""
        found = bytearray()
        while self._released:
            found += NUMBER.pack(self._released.popleft())
        return bytes(found)

    def clear(self) -> None:
        """Forget all segments."""
        self._segments.clear()


def _release(released: deque[int], number: int, doorbell: Doorbell) -> None:
    released.append(number)
    doorbell.ring()


def announcement(segments: Sequence[Segment]) -> tuple[bytes, tuple[int, ...]]:
    """What :meth:`Imports.announce` of the peer takes."""
    content = b"".join(_ANNOUNCED.pack(each.identity, each.size) for each in segments)
    return content, tuple(each.fd for each in segments)
