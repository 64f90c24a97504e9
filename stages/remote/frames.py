"""Frames on a stream socket: what goes over a channel, whole, in order, with file descriptors.

| kind, 1 byte | number of descriptors, 2 | length, 8 | content |
"""

from __future__ import annotations

import os
import socket
import struct
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NoReturn

__all__ = ["MOST_FDS", "Frame", "FrameKind", "FrameReader", "FrameWriter"]

_HEADER = struct.Struct("<BHQ")
MOST_FDS = 64
"""In one frame; Linux lets 253 pass at once."""

_PIECE = 256 * 2**10
"""Bytes that are read at once."""

_MSG_CMSG_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class FrameKind(IntEnum):
    """What a frame holds: the first five go over channels, the rest to a zygote and back."""

    HELLO = 1
    SEGMENTS = 2
    MESSAGE = 3
    RELEASES = 4
    DROPS = 5
    START = 6
    STARTED = 7
    EXITED = 8


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame.

    Attributes:
        kind: what it holds.
        content: its bytes.
        fds: descriptors beside them; of a frame that came, they are the receiver's.
    """

    kind: FrameKind
    content: bytes
    fds: tuple[int, ...] = ()


class FrameWriter:
    """Frames that wait to be sent over a socket that does not block. Not thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._waiting: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self.queued_bytes = 0

    def put(self, kind: FrameKind, content: bytes, fds: Sequence[int] = ()) -> None:
        """Queue a frame; its descriptors must stay open until it is sent."""
        header = _HEADER.pack(kind, len(fds), len(content))
        self.queued_bytes += len(header) + len(content)
        # A copy of a large content costs more than a call of the system.
        if len(content) <= _PIECE:
            self._waiting.append((memoryview(header + content), tuple(fds)))
        else:
            self._waiting.append((memoryview(header), tuple(fds)))
            self._waiting.append((memoryview(content), ()))

    def flush(self) -> bool:
        """Send what can be sent without waiting; whether that is all.

        Raises:
            OSError: the peer is gone.
        """
        while self._waiting:
            content, fds = self._waiting[0]
            beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
            try:
                sent = self._sock.sendmsg([content], beside)
            except BlockingIOError:
                return False
            self.queued_bytes -= sent
            if sent == len(content):
                self._waiting.popleft()
            else:
                self._waiting[0] = (content[sent:], ())
        return True

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting.clear()
        self.queued_bytes = 0


class FrameReader:
    """Puts frames together as they come in. Not thread-safe.

    Args:
        sock: that does not block.
        max_bytes: of a frame's content.
    """

    def __init__(self, sock: socket.socket, max_bytes: int) -> None:
        self._sock, self._max_bytes = sock, max_bytes
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def receive(self) -> bool:
        """Take in what is there; False at the end.

        Raises:
            OSError: the connection is broken, or descriptors could not be received.
        """
        try:
            piece, beside, flags, _ = self._sock.recvmsg(
                _PIECE, socket.CMSG_SPACE(MOST_FDS * array("i").itemsize), _MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return True
        for level, kind, content in beside:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array("i")
                fds.frombytes(content[: len(content) // fds.itemsize * fds.itemsize])
                self._fds.extend(fds)
        if flags & socket.MSG_CTRUNC:
            raise OSError(
                "a file descriptor could not be received: the process has too many open "
                "(raise the limit, ulimit -n)"
            )
        self._buffer += piece
        return bool(piece)

    def frames(self) -> Iterator[Frame]:
        """The frames that are whole.

        Raises:
            ValueError: what came is no frame.
        """
        start = 0
        try:
            while len(self._buffer) - start >= _HEADER.size:
                number, num_fds, length = _HEADER.unpack_from(self._buffer, start)
                kind = FrameKind(number)
                if length > self._max_bytes or num_fds > MOST_FDS:
                    raise ValueError(f"a frame of {length} bytes, {num_fds} descriptors")
                end = start + _HEADER.size + length
                if end > len(self._buffer):
                    return
                if num_fds > len(self._fds):
                    raise ValueError(f"{num_fds} descriptors announced, {len(self._fds)} there")
                with memoryview(self._buffer) as view:
                    content = bytes(view[start + _HEADER.size : end])
                start = end
                fds = tuple(self._fds.popleft() for _ in range(num_fds))
                yield Frame(kind, content, fds)
        finally:
            del self._buffer[:start]

    def refuse(self, frame: Frame) -> NoReturn:
        """Close descriptors that a frame must not bring.

        Raises:
            ValueError: always.
        """
        self._fds.extend(frame.fds)
        self.close()
        raise ValueError(f"descriptors came with a frame of {frame.kind.name}")

    def close(self) -> None:
        """Close descriptors that came and were not taken."""
        while self._fds:
            os.close(self._fds.popleft())
