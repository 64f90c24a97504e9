"""What a process has got from a peer."""

from __future__ import annotations

import os
import struct
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from stages.remote.segment import Segment
from stages.remote.segments import SharedBytes

__all__ = ["NUMBER", "Imports", "announcement"]

NUMBER = struct.Struct("<Q")
"""How the number of an export is told."""

_ANNOUNCED = struct.Struct("<16sQ")

_SHORTEST_NAP_MS, _LONGEST_NAP_MS = 10, 500


class _Held(weakref.ref[SharedBytes]):
    """Something that is held here, with its number; queued as soon as it is gone.

    The queue's own ``append`` is called then, and no Python. Python looks for signals when it
    enters a function, and drops what a handler raises while something is finalized: a Ctrl-C.
    """

    __slots__ = ("number",)
    number: int


class Imports:
    """The segments that a peer has announced, and what of them was let go of here.

    Attributes:
        nbytes: of all that was handed over so far.
    """

    def __init__(self) -> None:
        self._segments: dict[bytes, Segment] = {}
        self._held: dict[int, _Held] = {}
        self._gone: deque[_Held] = deque()
        self._nap_ms = _SHORTEST_NAP_MS
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
        made = SharedBytes(segment, offset, nbytes)
        held = _Held(made, self._gone.append)
        held.number = number
        self._held[number] = held
        self._nap_ms = _SHORTEST_NAP_MS
        return made

    def drop(self, content: bytes) -> None:
        """Forget segments; what lies in them stays for as long as a tensor of it is held here.

        Raises:
            ValueError: there is no such segment.
        """
        for start in range(0, len(content), 16):
            if self._segments.pop(content[start : start + 16], None) is None:
                raise ValueError("a segment was dropped that was not announced")

    def releases(self) -> bytes:
        """The numbers of what was let go of, once; :meth:`Exports.release` of the peer takes it."""
        found = bytearray()
        while self._gone:
            number = self._gone.popleft().number
            self._held.pop(number, None)
            found += NUMBER.pack(number)
        if found:
            self._nap_ms = _SHORTEST_NAP_MS
        return bytes(found)

    def nap_ms(self) -> int | None:
        """How long to sleep before it is time to look for releases; None while nothing is held.

        It grows while nothing is released: no descriptor tells of a release, so it is polled for.
        """
        if not self._held:
            return None
        nap_ms = self._nap_ms
        self._nap_ms = min(2 * nap_ms, _LONGEST_NAP_MS)
        return nap_ms

    def clear(self) -> None:
        """Forget all segments, and what is held: its sender no longer needs to hear of releases."""
        self._segments.clear()
        self._held.clear()


def announcement(segments: Sequence[Segment]) -> tuple[bytes, tuple[int, ...]]:
    """What :meth:`Imports.announce` of the peer takes."""
    content = b"".join(_ANNOUNCED.pack(each.identity, each.size) for each in segments)
    return content, tuple(each.fd for each in segments)
