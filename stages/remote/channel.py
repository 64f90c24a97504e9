"""Messages between two processes, with their tensors in shared memory.

A message is a frame on a stream socket, which arrives whole and in order, plus the file descriptors
of the shared memory segments that it refers to::

    | version, 1 byte | number of descriptors, 2 | length, 8 | content |
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.interface.log_fields import package_logger
from stages.remote.codec import INLINE_BYTES, Decoder, Reference, encode, plain_bytes
from stages.remote.shared_memory import Descriptor, RemoteBytes, Segment, SharedBytes, aligned

PROTOCOL_VERSION = 11
"""Version of the protocol between processes. A peer with another version is refused."""

_LOG = package_logger(__name__)
_HEADER = struct.Struct("<BHQ")
_MAX_FDS = 250
"""Maximum number of descriptors per ``sendmsg``; the limit of Linux is 253."""

_MAX_BYTES = 2**30
"""Maximum size of a message, shared memory excluded."""

_READ_BYTES = 256 * 2**10
"""Bytes per read."""

_MSG_CMSG_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_CLOSED_LOCALLY = "it was closed here"
_CLOSED_BY_PEER = "the other side closed it or has ended"


class ChannelClosed(ConnectionError):
    """The peer is gone, or the channel was closed locally; the message says which."""


class _Attachments:
    """Large contents of one message: new ones, and forwarded segments."""

    def __init__(self) -> None:
        self.contents: list[NDArray[np.uint8]] = []
        self._nbytes = 0
        self.numbers: dict[Descriptor, int] = {}  # the segment of new contents comes last

    def share(self, content: NDArray[np.uint8] | Tensor | RemoteBytes) -> Reference | None:
        """See :data:`stages.remote.codec.Share`."""
        if isinstance(content, SharedBytes) and (file := content.segment.file) is not None:
            number = self.numbers.setdefault(file, len(self.numbers))
            return Reference(number, content.nbytes, content.offset)
        if content.nbytes <= INLINE_BYTES:
            return None
        self.contents.append(plain_bytes(content))
        start = aligned(self._nbytes)
        self._nbytes = start + content.nbytes
        return Reference(-1, content.nbytes, start)

    def files(self) -> list[Descriptor]:
        """Return the descriptors of all segments.

        Raises:
            OSError: a system limit is reached.
        """
        new = [Segment.write(self.contents).file] if self.contents else []
        return [file for file in (*self.numbers, *new) if file is not None]


class FrameReader:
    """Assembles frames, of at most ``max_bytes`` of content, from what a socket receives."""

    def __init__(self, sock: socket.socket, max_bytes: int) -> None:
        self._sock, self._max_bytes = sock, max_bytes
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def receive(self) -> bool:
        """Wait for more bytes and buffer them; return False at the end of the stream.

        Raises:
            OSError: the connection is broken, or descriptors could not be received.
        """
        size = socket.CMSG_SPACE(_MAX_FDS * array("i").itemsize)
        piece, ancillary, flags, _ = self._sock.recvmsg(_READ_BYTES, size, _MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
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

    def frames(self) -> Iterator[tuple[bytes, list[int]]]:
        """Yield complete frames with descriptors, now the caller's; ``ValueError``: malformed."""
        start = 0
        try:
            while len(self._buffer) - start >= _HEADER.size:
                version, num_fds, length = _HEADER.unpack_from(self._buffer, start)
                if version != PROTOCOL_VERSION:
                    raise ValueError(
                        f"the other side speaks version {version} of the protocol between "
                        f"processes, and this one version {PROTOCOL_VERSION}: both must run the "
                        "same release"
                    )
                if length > self._max_bytes:
                    raise ValueError(f"a frame of {length} bytes")
                end = start + _HEADER.size + length
                if end > len(self._buffer):
                    return
                with memoryview(self._buffer) as view:
                    content = bytes(view[start + _HEADER.size : end])
                start = end
                yield content, [self._fds.popleft() for _ in range(num_fds)]
        finally:
            del self._buffer[:start]

    def close(self) -> None:
        """Close received descriptors that were not consumed."""
        while self._fds:
            os.close(self._fds.popleft())


class Channel:
    """One end of a connection; the other is in another process, or in this one.

    No call waits for the peer: what does not fit into the socket buffer is sent by another thread
    as the peer reads. So two peers that both send much do not deadlock, and a stopped peer blocks
    no sender.

    ::

        send() in any thread ──► encode ──► socket ──► thread: decode ──► on_message()
                                   └──── shared memory ────────┘

    Args:
        sock: a connected ``AF_UNIX`` stream socket; the channel closes it.
        kinds: union of the message types that the peer sends.
        name: the peer's name, for error messages and the thread.
    """

    def __init__(self, sock: socket.socket, kinds: Any, name: str) -> None:
        self.name = name
        sock.setblocking(True)
        self._sock = sock
        self._segments: list[Segment] = []
        self._decoder = Decoder(kinds, self._resolve)
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()  # guards everything below
        self._unsent: deque[tuple[memoryview, list[Descriptor]]] = deque()
        self._has_sender = False
        self._closed: str | None = None

    def start(self, on_message: Callable[[Any], object], on_end: Callable[[str], object]) -> None:
        """Start receiving in a separate thread; call once.

        Args:
            on_message: called with each message, in order, in that thread. An exception from it
                ends the channel.
            on_end: called once, after the last message, with the reason for the end, phrased to
                follow "the channel has ended: ".
        """
        if self._thread is not None:
            raise RuntimeError("a channel is started once")
        self._thread = threading.Thread(
            target=self._run, args=(on_message, on_end), name=f"channel {self.name}"[:60]
        )
        self._thread.daemon = True
        self._thread.start()

    def send(self, message: object) -> None:
        """Send a message atomically and in call order, without waiting for the peer.

        If no shared memory is available for its tensors, they are sent inside the message.

        Raises:
            ChannelClosed: the peer is gone, or the channel is closed.
            ValueError: the message cannot be encoded, or is too large; nothing is sent.
        """
        attachments = _Attachments()
        content = encode(message, attachments.share)
        files: list[Descriptor] = []
        if attachments.contents or attachments.numbers:
            try:
                files = attachments.files()
            except OSError as error:
                _LOG.debug("no shared memory for a message: %s", error)
                content = encode(message)
        if len(content) > _MAX_BYTES:
            raise ValueError(
                f"a message of {len(content)} bytes: {_MAX_BYTES} are the most that are sent at "
                "once"
            )
        with self._changed:
            self._check_open()
            num_files = len(files)
            while len(files) > _MAX_FDS:  # attached to empty frames
                empty_frame = memoryview(_HEADER.pack(PROTOCOL_VERSION, 0, 0))
                self._unsent.append((empty_frame, files[:_MAX_FDS]))
                files = files[_MAX_FDS:]
            frame = _HEADER.pack(PROTOCOL_VERSION, num_files, len(content)) + content
            self._unsent.append((memoryview(frame), files))
            if not self._has_sender:
                self._flush()
            if self._unsent and not self._has_sender:
                self._has_sender = True
                threading.Thread(target=self._send_rest, name="channel sender", daemon=True).start()
            self._check_open()

    def wait_until_sent(self, timeout_s: float) -> bool:
        """Wait until the peer's socket has everything that was sent; return True if it has.

        Raises:
            ChannelClosed: the peer is gone, or the channel is closed.
        """
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._closed is not None or not self._unsent, timeout_s
            )
            self._check_open()
            return done

    def close(self) -> None:
        """End the channel, dropping unsent messages.

        Returns immediately; the thread ends soon after. Idempotent, callable from any thread.
        """
        with self._changed:
            self._end(_CLOSED_LOCALLY)
            if self._thread is None:
                self._sock.close()

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended and all descriptors are closed; return True if so."""
        # The garbage collector may close the channel's owner in the channel's own thread.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _check_open(self) -> None:
        if self._closed is not None:
            raise ChannelClosed(f"the channel to {self.name} has ended: {self._closed}")

    def _end(self, reason: str, *, receives: bool = False) -> None:
        """Stop sending, and stop receiving unless ``receives``; needs the lock. Idempotent."""
        if self._closed is None:
            self._closed = reason
            if not receives:
                with suppress(OSError):  # the peer has ended
                    self._sock.shutdown(socket.SHUT_RDWR)  # wakes both threads
        self._unsent.clear()
        self._changed.notify_all()

    def _flush(self) -> None:
        """Send what fits into the socket buffer; needs the lock."""
        try:
            while self._unsent:
                self._note_sent(self._send_some(*self._unsent[0], socket.MSG_DONTWAIT))
        except BlockingIOError:
            pass
        except OSError:  # the peer stopped reading; what it sent can still be received
            self._end(_CLOSED_BY_PEER, receives=True)

    def _send_rest(self) -> None:
        """Send as the peer reads, until the queue is empty."""
        while True:
            with self._changed:
                if not self._unsent:
                    self._has_sender = False
                    self._changed.notify_all()
                    return
                content, files = self._unsent[0]
            try:
                num_sent = self._send_some(content, files, 0)
            except OSError:
                num_sent = 0
            with self._changed:
                if not num_sent:
                    self._end(_CLOSED_BY_PEER, receives=True)
                elif self._unsent:  # not closed in the meantime
                    self._note_sent(num_sent)

    def _send_some(self, content: memoryview, files: Sequence[Descriptor], flags: int) -> int:
        fds = array("i", [file.fd for file in files])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if files else []
        return self._sock.sendmsg([content], ancillary, flags)

    def _note_sent(self, num_sent: int) -> None:
        content, _ = self._unsent[0]
        if num_sent == len(content):
            self._unsent.popleft()
        else:
            self._unsent[0] = (content[num_sent:], [])

    def _run(self, on_message: Callable[[Any], object], on_end: Callable[[str], object]) -> None:
        reader = FrameReader(self._sock, _MAX_BYTES)
        try:
            reason = self._receive(reader, on_message)
        except ConnectionError:  # the peer left without reading everything
            reason = _CLOSED_BY_PEER
        except (OSError, ValueError, MemoryError) as error:
            reason = str(error)
        except Exception as error:  # of a message handler; the owner gets it through on_end
            _LOG.exception("a message of %s could not be handled", self.name)
            reason = f"a message could not be handled: {type(error).__name__}: {error}"
        with self._changed:
            if self._closed == _CLOSED_LOCALLY:
                reason = _CLOSED_LOCALLY
            self._end(reason)
            while self._has_sender:  # it uses the socket
                self._changed.wait()
            self._sock.close()
        reader.close()
        on_end(reason)

    def _receive(self, reader: FrameReader, on_message: Callable[[Any], object]) -> str:
        """Receive until the end; return the reason for the end."""
        while reader.receive():
            for content, fds in reader.frames():
                self._segments = [Segment.received(fd) for fd in fds]
                message = self._decoder.decode(content) if content else None
                self._segments = []
                if message is not None:
                    on_message(message)
                del message  # hold no reference while waiting for the next one
                if self._closed == _CLOSED_LOCALLY:
                    return _CLOSED_LOCALLY
        return _CLOSED_BY_PEER

    def _resolve(self, reference: Reference) -> SharedBytes:
        """Resolve a reference; see :data:`stages.remote.codec.Find`."""
        if not -1 <= reference.number < len(self._segments):
            raise ValueError(f"segment {reference.number} of {len(self._segments)}")
        return SharedBytes(self._segments[reference.number], reference.offset, reference.nbytes)
