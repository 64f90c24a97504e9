"""Messages between two processes, with the tensors that they hold in shared memory."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.interface.log_fields import package_logger
from stages.remote.codec import Codec
from stages.remote.doorbell import Doorbell
from stages.remote.exports import Exports
from stages.remote.frames import MOST_FDS, Frame, FrameKind, FrameReader, FrameWriter
from stages.remote.imports import Imports, announcement
from stages.remote.segments import SegmentPool

__all__ = ["PROTOCOL_VERSION", "Channel", "ChannelClosed", "ChannelCounters"]

PROTOCOL_VERSION = 5
"""Of all that two processes say to each other. One that speaks another is refused."""

_LOG = package_logger(__name__)
_MOST_BYTES = 2**30
"""Of a message without what is shared."""

_CLOSED_HERE = "it was closed here"
_CLOSED_THERE = "the other side closed it or has ended"


class _Hello(msgspec.Struct):
    """The first frame of both sides."""

    protocol: int


class ChannelClosed(ConnectionError):
    """The other side is gone, or the channel was closed here; the message says which."""


@dataclass(frozen=True, slots=True)
class ChannelCounters:
    """What went over a channel so far.

    Attributes:
        messages_sent, messages_received: messages.
        bytes_sent, bytes_received: of the messages themselves.
        shared_bytes_sent, shared_bytes_received: of the tensors that they handed over in shared
            memory, those that were only passed on included.
    """

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    shared_bytes_sent: int = 0
    shared_bytes_received: int = 0


class Channel:
    """One end of a connection; the other is in another process, or in this one.

    No call waits for the peer: what its socket has no room for is sent by the channel's own thread
    as the peer reads. So two peers that send much at once go on, and one that has stopped holds
    up no sender; what waits for it is counted in :attr:`queued_bytes`.

    ::

        send() in any thread ──► encode, place ──► socket ──► thread: decode ──► on_message()
                                     ▲                           tensors over shared memory
                                     └──── releases ◄──────────── garbage-collected

    Args:
        sock: a connected stream socket of ``AF_UNIX``; the channel closes it.
        codec: the same on both sides.
        pool: where this side places tensors; it may be shared with other channels.
        name: of the peer, for messages and the thread.

    Attributes:
        name: as given.
    """

    def __init__(self, sock: socket.socket, codec: Codec, pool: SegmentPool, name: str) -> None:
        self.name = name
        sock.setblocking(False)
        self._sock, self._codec = sock, codec
        self._reader = FrameReader(sock, _MOST_BYTES)
        self._doorbell = Doorbell()
        self._imports = Imports()
        self._lock = threading.Lock()  # over all below
        self._is_sent = threading.Condition(self._lock)
        self._writer = FrameWriter(sock)
        self._exports = Exports(pool, self._doorbell)
        self._messages_sent = self._bytes_sent = self._shared_bytes_sent = 0
        self._messages_received = self._bytes_received = 0
        self._closed: str | None = None
        self._thread: threading.Thread | None = None
        self._peer_is_known = False
        self._writer.put(FrameKind.HELLO, msgspec.msgpack.encode(_Hello(PROTOCOL_VERSION)))

    def __repr__(self) -> str:
        return f"Channel({self.name!r}, {'open' if self._closed is None else self._closed})"

    def start(self, on_message: Callable[[Any], object], on_end: Callable[[str], object]) -> None:
        """Begin to receive, in a thread of its own; to be called once.

        Args:
            on_message: called with each message, in order, in that thread. What it raises ends the
                channel.
            on_end: called once, after the last message, with what ended the channel, in words that
                go on after "the channel has ended: ".
        """
        with self._lock:
            if self._thread is not None:
                raise RuntimeError("a channel is started once")
            self._thread = threading.Thread(
                target=self._run, args=(on_message, on_end), name=f"channel {self.name}"[:60]
            )
            self._thread.daemon = True
        self._thread.start()

    def send(self, message: object) -> None:
        """Send a message, whole and in the order of the calls, without waiting for the peer.

        Raises:
            ChannelClosed: the peer is gone, or the channel is closed.
            ValueError: it holds what messages do not know, or is too large; nothing is sent.
            MemoryError: there is no shared memory left for its tensors; nothing is sent.
        """
        self._check_open()
        shipment = self._exports.shipment()
        try:
            content = self._codec.encode(message, shipment.share)
            if len(content) > _MOST_BYTES:
                raise ValueError(
                    f"a message of {len(content)} bytes: {_MOST_BYTES} are the most that are sent "
                    "at once"
                )
        except BaseException:
            shipment.undo()
            raise
        with self._lock:
            if self._closed is not None:
                shipment.undo()
            self._check_open()
            new = self._exports.add(shipment)
            for start in range(0, len(new), MOST_FDS):
                self._writer.put(FrameKind.SEGMENTS, *announcement(new[start : start + MOST_FDS]))
            self._writer.put(FrameKind.MESSAGE, content)
            self._messages_sent += 1
            self._bytes_sent += len(content)
            self._shared_bytes_sent += shipment.nbytes
            is_all = self._flush()
            self._check_open()
        if not is_all:
            self._doorbell.ring()

    def wait_until_sent(self, timeout_s: float) -> bool:
        """Wait until the peer's socket has all that was sent; whether it has.

        Raises:
            ChannelClosed: the peer is gone, or the channel is closed.
        """
        with self._is_sent:
            done = self._is_sent.wait_for(
                lambda: self._closed is not None or not self._writer.queued_bytes, timeout_s
            )
            self._check_open()
            return done

    def close(self) -> None:
        """End the channel: what waits is not sent, and what the peer has is given up.

        Returns at once; the thread ends soon after. May be called again, and from any thread.
        """
        with self._lock:
            self._close_for_sending(_CLOSED_HERE)
            self._exports.abandon()
            is_started = self._thread is not None
        if is_started:
            self._doorbell.ring()
        else:
            self._close_descriptors()

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended and all descriptors are closed; whether that is so."""
        # The garbage collector may close the channel's owner in this very thread.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    @property
    def queued_bytes(self) -> int:
        """Bytes that the peer's socket has no room for yet."""
        return self._writer.queued_bytes

    @property
    def num_exports(self) -> int:
        """Tensors that the peer has been handed and has not let go of."""
        return len(self._exports)

    @property
    def counters(self) -> ChannelCounters:
        """A reading of what went over the channel."""
        return ChannelCounters(
            self._messages_sent,
            self._messages_received,
            self._bytes_sent,
            self._bytes_received,
            self._shared_bytes_sent,
            self._imports.nbytes,
        )

    def _check_open(self) -> None:
        if self._closed is not None:
            raise ChannelClosed(f"the channel to {self.name} has ended: {self._closed}")

    def _close_for_sending(self, reason: str) -> None:
        """Under the lock."""
        self._closed = self._closed or reason
        self._writer.clear()
        self._is_sent.notify_all()

    def _close_descriptors(self) -> None:
        with suppress(OSError):  # a fork may have the socket, too, and would keep it open
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._reader.close()
        self._imports.clear()
        self._doorbell.close()

    def _flush(self) -> bool:
        """Send what can be sent, under the lock; whether that is all."""
        released = self._imports.releases()
        if released:
            self._writer.put(FrameKind.RELEASES, released)
        gone = self._exports.segments_gone()
        if gone:
            self._writer.put(FrameKind.DROPS, b"".join(gone))
        try:
            is_all = self._writer.flush()
        except OSError:  # what it has sent before is still to be read
            self._close_for_sending(_CLOSED_THERE)
            return True
        if is_all:
            self._is_sent.notify_all()
        return is_all

    def _run(self, on_message: Callable[[Any], object], on_end: Callable[[str], object]) -> None:
        try:
            reason = self._receive(on_message)
        except ConnectionError:  # it left without having read all
            reason = _CLOSED_THERE
        except (OSError, ValueError, MemoryError) as error:
            reason = str(error)
        except Exception as error:  # of whoever handles messages; the other side is told
            _LOG.exception("a message of %s could not be handled", self.name)
            reason = f"a message could not be handled: {type(error).__name__}: {error}"
        with self._lock:
            self._close_for_sending(reason)
            self._exports.abandon()
        self._close_descriptors()
        on_end(reason)

    def _receive(self, on_message: Callable[[Any], object]) -> str:
        """Receive until the end, and send what waits; what ended it."""
        poll = select.poll()
        poll.register(self._doorbell.fileno(), select.POLLIN)
        while True:
            with self._lock:
                is_all = self._closed is not None or self._flush()
            poll.register(self._sock, select.POLLIN | (0 if is_all else select.POLLOUT))
            ready = {fd for fd, _ in poll.poll(self._imports.nap_ms())}
            self._doorbell.answer()
            if self._closed == _CLOSED_HERE:
                return _CLOSED_HERE
            if self._sock.fileno() not in ready:
                continue
            is_open = self._reader.receive()
            for frame in self._reader.frames():
                self._take(frame, on_message)
                if self._closed == _CLOSED_HERE:
                    return _CLOSED_HERE
            if not is_open:
                return _CLOSED_THERE

    def _take(self, frame: Frame, on_message: Callable[[Any], object]) -> None:
        if not self._peer_is_known and frame.kind is not FrameKind.HELLO:
            raise ValueError("the other side did not say which version of the protocol it speaks")
        if frame.fds and frame.kind is not FrameKind.SEGMENTS:
            self._reader.refuse(frame)
        match frame.kind:
            case FrameKind.HELLO:
                self._greet(frame.content)
            case FrameKind.SEGMENTS:
                self._imports.announce(frame.content, frame.fds)
            case FrameKind.RELEASES:
                with self._lock:
                    self._exports.release(frame.content)
            case FrameKind.DROPS:
                self._imports.drop(frame.content)
            case FrameKind.MESSAGE:
                self._messages_received += 1
                self._bytes_received += len(frame.content)
                on_message(self._codec.decode(frame.content, self._imports.find))

    def _greet(self, content: bytes) -> None:
        version = msgspec.msgpack.decode(content, type=_Hello).protocol
        if version != PROTOCOL_VERSION:
            raise ValueError(
                f"the other side speaks version {version} of the protocol between processes, and "
                f"this one version {PROTOCOL_VERSION}: both must run the same release"
            )
        self._peer_is_known = True
