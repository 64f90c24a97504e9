"""Messages between two processes, with the tensors that they hold in shared memory.

A message is a frame on a stream socket, which arrives whole, in order, and with file descriptors::

    | kind, 1 byte | number of descriptors, 2 | length, 8 | content |

Exports are what this process has handed to its peer and the peer has not released; imports are what
it has from its peer. A doorbell wakes the thread that polls the socket.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import struct
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.interface.log_fields import package_logger
from stages.remote.codec import Decoder, Reference, encode
from stages.remote.segments import Place, RemoteBytes, Segment, SegmentPool, SharedBytes

__all__ = [
    "INLINE_BYTES",
    "PROTOCOL_VERSION",
    "Channel",
    "ChannelClosed",
    "Doorbell",
    "Exports",
    "Frame",
    "FrameKind",
    "FrameReader",
    "FrameWriter",
    "Imports",
    "Shipment",
]


class _Pipe:
    """Closed when the last reference to it goes, and so never while a thread writes to it."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        for fd in (self.read_fd, self.write_fd):
            os.set_blocking(fd, False)
            weakref.finalize(self, os.close, fd).atexit = False


class Doorbell:
    """A descriptor that can be read from once any thread has rung.

    To ring takes no lock: it may be done by what is garbage-collected, in whatever thread, in the
    middle of whatever it does.
    """

    def __init__(self) -> None:
        self._pipe: _Pipe | None = _Pipe()
        self._is_rung = False

    def fileno(self) -> int:
        """The descriptor; -1 once it is closed."""
        return -1 if self._pipe is None else self._pipe.read_fd

    def ring(self) -> None:
        """Wake the thread, unless it is about to look anyway. Nothing happens once it is closed."""
        pipe = self._pipe
        if pipe is None or self._is_rung:
            return
        self._is_rung = True
        with suppress(BlockingIOError):  # it is full, and so has been rung
            os.write(pipe.write_fd, b"\0")

    def answer(self) -> None:
        """To be called before looking: who rings from now on rings again."""
        pipe = self._pipe
        if pipe is not None:
            with suppress(BlockingIOError):
                os.read(pipe.read_fd, 4096)
        self._is_rung = False

    def close(self) -> None:
        """Close it. May be called again."""
        self._pipe = None


INLINE_BYTES = 16 * 2**10
"""Up to here a copy through the socket is cheaper than a place in shared memory."""


class Shipment:
    """What one message hands over, until the message is on its way.

    Args:
        pool: where tensors of this process are placed.
        numbers: of exports; each is taken once.

    Attributes:
        items: by their numbers, what is handed over: places in the pool, and what other processes
            have placed, which is held for the peer.
    """

    def __init__(self, pool: SegmentPool, numbers: Iterator[int]) -> None:
        self._pool, self._numbers = pool, numbers
        self.items: dict[int, Place | SharedBytes] = {}

    def share(self, content: NDArray[np.uint8] | Tensor | RemoteBytes) -> Reference | None:
        """Hand over what is large; see :data:`stages.remote.codec.Share`.

        Raises:
            MemoryError: there is no shared memory left.
        """
        item: Place | SharedBytes
        if isinstance(content, SharedBytes):
            item = content
        elif isinstance(content, RemoteBytes):
            return self.share(content.array())
        elif content.nbytes <= INLINE_BYTES:
            return None
        else:
            item = self._place(content)
        number = next(self._numbers)
        self.items[number] = item
        return Reference(number, item.nbytes, item.segment.identity, item.offset)

    def _place(self, content: NDArray[np.uint8] | Tensor) -> Place:
        place = self._pool.place(content.nbytes)
        try:
            if isinstance(content, Tensor):
                torch.from_numpy(place.content).copy_(content)
            else:
                place.content[:] = content
        except BaseException:
            place.free()
            raise
        return place

    def undo(self) -> None:
        """Take all back: nothing was sent."""
        for item in self.items.values():
            if isinstance(item, Place):
                item.free()
        self.items = {}


class Exports:
    """What a peer has. Not thread-safe, but for :meth:`shipment`.

    Args:
        pool: of this process.
        doorbell: rung when a segment that the peer knows is gone.
    """

    def __init__(self, pool: SegmentPool, doorbell: Doorbell) -> None:
        self._pool, self._doorbell = pool, doorbell
        self._numbers = itertools.count()
        self._items: dict[int, Place | SharedBytes] = {}
        self._known: dict[bytes, weakref.ref[Segment]] = {}
        self._gone: deque[bytes] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def shipment(self) -> Shipment:
        """For a message that is being made."""
        return Shipment(self._pool, self._numbers)

    def add(self, shipment: Shipment) -> list[Segment]:
        """Take over what a message hands over; the segments that the peer does not know yet."""
        self._items.update(shipment.items)
        new = {
            item.segment.identity: item.segment
            for item in shipment.items.values()
            if item.segment.identity not in self._known
        }
        for identity, segment in new.items():
            self._known[identity] = self._watch(segment)
        return list(new.values())

    def _watch(self, segment: Segment) -> weakref.ref[Segment]:
        identity, gone, doorbell = segment.identity, self._gone, self._doorbell

        def tell(_: object) -> None:
            gone.append(identity)
            doorbell.ring()

        return weakref.ref(segment, tell)

    def segments_gone(self) -> list[bytes]:
        """Segments that the peer knows and that no longer exist here; each is announced once."""
        found = []
        while self._gone:
            identity = self._gone.popleft()
            del self._known[identity]
            found.append(identity)
        return found

    def release(self, numbers: Sequence[int]) -> None:
        """The peer has let go of some; see :meth:`Imports.releases`."""
        for number in numbers:
            item = self._items.pop(number)
            if isinstance(item, Place):
                item.free()

    def abandon(self) -> None:
        """Give up all places, since the peer is gone or not listened to: it may still read them."""
        items, self._items = self._items, {}
        for item in items.values():
            if isinstance(item, Place):
                item.abandon()
        self._known.clear()
        self._gone.clear()


_HEADER = struct.Struct("<BHQ")
_MOST_FDS = 64
"""In one frame; Linux lets 253 pass at once."""

_PIECE = 256 * 2**10
"""Bytes that are read at once."""

_MSG_CMSG_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class FrameKind(IntEnum):
    """The content of a frame."""

    HELLO = 1
    SEGMENTS = 2
    MESSAGE = 3
    RELEASES = 4
    DROPS = 5


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
                _PIECE, socket.CMSG_SPACE(_MOST_FDS * array("i").itemsize), _MSG_CMSG_CLOEXEC
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
                if length > self._max_bytes:
                    raise ValueError(f"a frame of {length} bytes")
                end = start + _HEADER.size + length
                if end > len(self._buffer):
                    return
                with memoryview(self._buffer) as view:
                    content = bytes(view[start + _HEADER.size : end])
                start = end
                fds = tuple(self._fds.popleft() for _ in range(num_fds))
                yield Frame(kind, content, fds)
        finally:
            del self._buffer[:start]

    def close(self) -> None:
        """Close descriptors that came and were not taken."""
        while self._fds:
            os.close(self._fds.popleft())


_SHORTEST_NAP_MS, _LONGEST_NAP_MS = 10, 500


class _Held(weakref.ref[SharedBytes]):
    """Something that is held here, with its number; queued as soon as it is gone.

    The queue's own ``append`` is called then, and no Python. Python looks for signals when it
    enters a function, and drops what a handler raises while something is finalized: a Ctrl-C.
    """

    __slots__ = ("number",)
    number: int


class Imports:
    """The segments that a peer has announced, and what of them was let go of here."""

    def __init__(self) -> None:
        self._segments: dict[bytes, Segment] = {}
        self._held: dict[int, _Held] = {}
        self._gone: deque[_Held] = deque()
        self._nap_ms = _SHORTEST_NAP_MS

    def announce(self, segments: Sequence[tuple[bytes, int]], fds: Sequence[int]) -> None:
        """Take segments in, by identity and size.

        Raises:
            ValueError: one has another size.
        """
        for (identity, size), fd in zip(segments, fds, strict=True):
            self._segments[identity] = Segment(identity, fd, size)

    def find(self, reference: Reference) -> SharedBytes:
        """What a reference stands for; see :data:`stages.remote.codec.Find`.

        Raises:
            ValueError: it stands for nothing.
        """
        segment = self._segments.get(reference.segment)
        if segment is None:
            raise ValueError("it speaks of a segment that was not announced")
        made = SharedBytes(segment, reference.offset, reference.nbytes)
        held = _Held(made, self._gone.append)
        held.number = reference.number
        self._held[held.number] = held
        self._nap_ms = _SHORTEST_NAP_MS
        return made

    def drop(self, segments: Sequence[bytes]) -> None:
        """Forget segments; their content stays for as long as a tensor of it is held here."""
        for identity in segments:
            del self._segments[identity]

    def releases(self) -> list[int]:
        """The numbers of what was let go of, once; :meth:`Exports.release` of the peer takes it."""
        found = []
        while self._gone:
            number = self._gone.popleft().number
            self._held.pop(number, None)
            found.append(number)
        if found:
            self._nap_ms = _SHORTEST_NAP_MS
        return found

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


PROTOCOL_VERSION = 7
"""Of all that two processes say to each other. One that speaks another is refused."""

_LOG = package_logger(__name__)
_MOST_BYTES = 2**30
"""Of a message without what is shared."""

_CLOSED_HERE = "it was closed here"
_CLOSED_THERE = "the other side closed it or has ended"


_PACK = msgspec.msgpack.encode
_ANNOUNCED = msgspec.msgpack.Decoder(list[tuple[bytes, int]])
_NUMBERS = msgspec.msgpack.Decoder(list[int])
_IDENTITIES = msgspec.msgpack.Decoder(list[bytes])


class _Hello(msgspec.Struct):
    """The first frame of both sides."""

    protocol: int


class ChannelClosed(ConnectionError):
    """The other side is gone, or the channel was closed here; the message says which."""


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
        kinds: the union of all that the peer sends.
        pool: where this side places tensors; it may be shared with other channels.
        name: of the peer, for messages and the thread.

    Attributes:
        name: as given.
    """

    def __init__(self, sock: socket.socket, kinds: Any, pool: SegmentPool, name: str) -> None:
        self.name = name
        sock.setblocking(False)
        self._sock = sock
        self._reader = FrameReader(sock, _MOST_BYTES)
        self._doorbell = Doorbell()
        self._imports = Imports()
        self._decoder = Decoder(kinds, self._imports.find)
        self._lock = threading.Lock()  # over all below
        self._is_sent = threading.Condition(self._lock)
        self._writer = FrameWriter(sock)
        self._exports = Exports(pool, self._doorbell)
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
            content = encode(message, shipment.share)
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
            for start in range(0, len(new), _MOST_FDS):
                some = new[start : start + _MOST_FDS]
                announced = _PACK([(each.identity, each.size) for each in some])
                self._writer.put(FrameKind.SEGMENTS, announced, [each.fd for each in some])
            self._writer.put(FrameKind.MESSAGE, content)
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
            self._writer.put(FrameKind.RELEASES, _PACK(released))
        gone = self._exports.segments_gone()
        if gone:
            self._writer.put(FrameKind.DROPS, _PACK(gone))
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
        except Exception as error:  # of a handler of messages; the other side gets it
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
        match frame.kind:
            case FrameKind.HELLO:
                self._greet(frame.content)
            case FrameKind.SEGMENTS:
                self._imports.announce(_ANNOUNCED.decode(frame.content), frame.fds)
            case FrameKind.RELEASES:
                with self._lock:
                    self._exports.release(_NUMBERS.decode(frame.content))
            case FrameKind.DROPS:
                self._imports.drop(_IDENTITIES.decode(frame.content))
            case FrameKind.MESSAGE:
                on_message(self._decoder.decode(frame.content))

    def _greet(self, content: bytes) -> None:
        version = msgspec.msgpack.decode(content, type=_Hello).protocol
        if version != PROTOCOL_VERSION:
            raise ValueError(
                f"the other side speaks version {version} of the protocol between processes, and "
                f"this one version {PROTOCOL_VERSION}: both must run the same release"
            )
        self._peer_is_known = True
