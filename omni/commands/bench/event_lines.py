"""Server-sent events as they come, in whatever pieces the network brings them."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["EventLines"]

_MOST_BYTES = 64 * 2**20


class EventLines:
    """Takes bytes, and gives the data of every event as soon as all of it is there.

    Comments, and fields other than ``data``, are left out, as are events without data.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []
        self._num_bytes = 0
        self._after_return = False

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Take what came; yield the data of the events that it completes.

        Raises:
            ValueError: an event is longer than 64 MiB.
        """
        for line in self._lines(chunk):
            if not line:
                if self._data:
                    yield b"\n".join(self._data)
                self._data, self._num_bytes = [], 0
                continue
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
                self._num_bytes += len(value)
        if len(self._line) + self._num_bytes > _MOST_BYTES:
            raise ValueError(f"an event is longer than {_MOST_BYTES:,} bytes")

    def _lines(self, chunk: bytes) -> Iterator[bytes]:
        """Complete lines; they end in ``\\n``, ``\\r\\n`` or ``\\r``."""
        if chunk and self._after_return:
            chunk = chunk.removeprefix(b"\n")  # the second half of one end
            self._after_return = False
        if chunk:
            self._after_return = chunk.endswith(b"\r")
        first, *others = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._line += first
        for following in others:
            line = bytes(self._line)
            self._line[:] = following
            yield line
