"""A worker in an actor of a Ray cluster, the connection to it, and their handshake."""

from __future__ import annotations

import itertools
import os
import queue
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import msgspec
import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.interface.log_fields import package_logger
from engine.interface.placed_error import described
from stages.cluster.direct_transport import Offers
from stages.cluster.object_bytes import HeldObjects, ObjectBytes, ObjectDecoder
from stages.remote.codec import INLINE_BYTES, Decoder, Reference, encode, plain_bytes
from stages.remote.messages import LinkMessage, StageSpec, WorkerMessage, WorkerSpec
from stages.remote.shared_memory import RemoteBytes
from stages.remote.supervisor import Connection, NoPlaceError
from stages.remote.worker import Build, WorkerLoop, build_stage, log_fields_of
from stages.remote.worker_log import forward_log
from stages.stage import Stage, Transform
from stages.trace_events import this_clock

PROTOCOL_VERSION = 12
"""Version of the protocol between actors and links. A peer with another version is refused."""

_MAX_ITEMS = 4096
"""Maximum number of items per call of :meth:`ActorWorker.say`; Ray tracks them until it ends."""

_MAX_MESSAGES = 64

_LOG = package_logger(__name__)


class Hello(msgspec.Struct, frozen=True):
    """First message of an actor: its protocol version, process id and machine."""

    protocol: int
    pid: int
    machine: str


class Bundle(msgspec.Struct, frozen=True):
    """A batch of messages of an actor. The objects that accompany them follow, in order.

    Attributes:
        is_offered: for each message and each of its objects, true if it is to be fetched directly;
            the others follow the bundle.
        num_taken: messages to the actor that have arrived so far, without a gap.
        ended: reason for the worker's end; nothing comes after it.
    """

    contents: list[bytes] = []
    is_offered: list[list[bool]] = []
    num_taken: int = 0
    hello: Hello | None = None
    ended: str | None = None


_Attachment: TypeAlias = "NDArray[np.uint8] | Tensor"
"""Content that a message refers to by number. Tensors go directly from actor to actor."""


class ActorWorker:
    """Drives stages by commands, and reports events. ::

        link ── take(number, bytes, references) ──► in order ──► WorkerLoop, in a separate thread
        link ◄── say(): bytes, then the objects that go with them ◄── outbox ◄──┘
        link ◄── hand_over(): references to content in this actor, if the transport is direct

    The objects that :meth:`say` yields are owned by the calling process: they stay in the object
    store when this actor dies, as long as there are references to them.

    Args:
        argument: the encoded :class:`~stages.remote.messages.WorkerSpec`.
    """

    def __init__(self, argument: bytes, build: Build = build_stage) -> None:
        spec: WorkerSpec = Decoder(WorkerSpec).decode(argument)
        self._decoder = ObjectDecoder(LinkMessage)
        # Messages with their objects; finally, perhaps twice, the reason for the worker's end.
        self._outbox: queue.SimpleQueue[tuple[bytes, list[_Attachment]] | str] = queue.SimpleQueue()
        self._ended: str | None = None
        self._num_taken = 0
        self._early: dict[int, Any] = {}  # messages that wait for an earlier one, by number
        self._build = build
        self._offers = None if spec.tensor_transport is None else Offers(spec.tensor_transport)
        self._is_shown = any(stage.is_shown for stage in spec.stages)
        self._loop = WorkerLoop(spec, self._send, self._build_checked)
        self._lock = threading.Lock()  # guards the next field
        self._num_calls = 0
        self._hello: Hello | None = Hello(PROTOCOL_VERSION, os.getpid(), machine_name())
        self._thread = threading.Thread(
            target=self._run, args=(spec,), name=f"stage {spec.label}", daemon=True
        )
        self._thread.start()

    # Ray repeats a call that is lost on its way, or else the link does; both may happen.
    @ray.method(concurrency_group="take", num_returns=0, max_task_retries=-1)
    def take(self, number: int, content: bytes, references: list[Any]) -> None:
        """Receive the message with a sequence number; duplicates are ignored."""
        if number < self._num_taken or number in self._early:
            return
        try:
            if references:  # fetch them here, so that no step waits for the network
                ray.wait(references, num_returns=len(references), fetch_local=True)
            self._early[number] = self._decoder.decode(content, references)
            while self._num_taken in self._early:
                self._loop.take(self._early.pop(self._num_taken))
                self._num_taken += 1
        except Exception as error:  # no caller waits for this call; reported to the link
            _LOG.exception("a message could not be taken")
            self._end_outbox(f"could not take a message: {described(error)}")
            self._loop.end()

    @ray.method(concurrency_group="take", num_returns=0, max_task_retries=-1)
    def end(self) -> None:
        """End the worker after its current turn."""
        self._loop.end()

    @ray.method(concurrency_group="say", num_returns="streaming")
    def say(self, number: int) -> Iterator[bytes | NDArray[np.uint8]]:
        """Yield the worker's messages as they come: each bundle, then the objects of its messages.

        Ends after the last message, or when the maximum number of items requires another call.

        Args:
            number: number of previous calls, which have ended.

        Raises:
            RuntimeError: a call with this number came before: it was repeated, and both arrived.
        """
        with self._lock:
            if number != self._num_calls:
                raise RuntimeError(f"call {number} came twice")
            self._num_calls += 1
        num_items = 0
        ended = None
        while num_items < _MAX_ITEMS and ended is None:
            bundle, attachments = self._next_bundle()
            ended = bundle.ended
            num_items += 1 + len(attachments)
            yield msgspec.msgpack.encode(bundle)
            while attachments:  # hold no references while waiting for the next bundle
                yield attachments.popleft()

    @ray.method(concurrency_group="hand over")
    def hand_over(self, count: int) -> list[Any]:
        """Return references to the next tensors that bundles have announced."""
        assert self._offers is not None, "nothing was offered"
        return self._offers.hand_over(count)

    def _next_bundle(self) -> tuple[Bundle, deque[NDArray[np.uint8]]]:
        hello, self._hello = self._hello, None
        if hello is not None:
            return Bundle(hello=hello), deque()
        messages: list[tuple[bytes, list[_Attachment]]] = []
        ended = None
        while ended is None and (not messages or not self._outbox.empty()):
            match self._outbox.get():
                case str(reason):
                    ended = reason
                    self._outbox.put(reason)  # for the next call
                case message:
                    messages.append(message)
            if len(messages) == _MAX_MESSAGES:
                break
        contents = [each for _, attachments in messages for each in attachments]
        if self._offers is not None:
            self._offers.add([each for each in contents if isinstance(each, Tensor)])
        bundle = Bundle(
            [content for content, _ in messages],
            [[isinstance(each, Tensor) for each in attachments] for _, attachments in messages],
            num_taken=self._num_taken,
            ended=ended,
        )
        return bundle, deque(each for each in contents if not isinstance(each, Tensor))

    @property
    def is_over(self) -> bool:
        """True if the worker has ended."""
        return not self._thread.is_alive()

    def settle_in(self, spec: WorkerSpec) -> None:
        """Configure logging and threads of the process, from the thread that will step."""
        forward_log(self._send, spec.log_level, log_fields_of(spec))
        torch.set_num_threads(spec.threads)

    def _build_checked(self, spec: StageSpec) -> tuple[Stage, Transform | None]:
        built = self._build(spec)
        if self._offers is not None:
            self._offers.check()
        return built

    def _run(self, spec: WorkerSpec) -> None:
        reason = "has ended"
        try:
            self.settle_in(spec)
            self._loop.run()
        except Exception as error:  # reported to the link, which starts another worker
            _LOG.exception("a worker failed")
            reason = f"failed with {described(error)}"
        finally:
            self._end_outbox(reason)

    def _end_outbox(self, reason: str) -> None:
        self._ended = self._ended or reason
        self._outbox.put(self._ended)

    def _send(self, message: WorkerMessage) -> None:
        attachments: list[_Attachment] = []
        # Content for the user has to outlive this actor.
        offers = None if self._is_shown else self._offers

        def share(content: NDArray[np.uint8] | Tensor | RemoteBytes) -> Reference | None:
            offered = None if offers is None else offers.made_of(content)
            if offered is None and content.nbytes <= INLINE_BYTES:
                return None
            attachments.append(plain_bytes(content) if offered is None else offered)
            return Reference(len(attachments) - 1, content.nbytes)

        encoded = encode(message, share)
        if self._ended is not None:
            raise ConnectionError(f"the actor has ended: {self._ended}")
        self._outbox.put((encoded, attachments))


def machine_name() -> str:
    """Return a name that is equal only in processes that see each other's process ids."""
    try:
        return f"{this_clock()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # not on Linux; then no two processes count as being on one machine
        return f"unknown {os.getpid()}"


_EXIT = re.compile(r"Worker exit type: (\w+) Worker exit detail: ([^.\n]*)")
_RESEND_AFTER_S = 3.0
"""Timeout after which a message that an active actor has not confirmed is resent."""

_MAX_RESENDS = 20
"""Maximum number of consecutive resends before an actor is given up."""

_CHECK_INTERVAL_S = 1.0
"""Interval of checking that the cluster still has resources for an actor that is starting."""


class ActorConnection(Connection):
    """Connection to an actor, given a handle of :class:`ActorWorker`.

    Args:
        on_message, on_end: see :data:`~stages.remote.supervisor.Connect`.
        check_there: called periodically until the actor's first message; raises ``NoPlaceError`` if
            the cluster has no more resources for it, for which Ray would wait indefinitely.
    """

    start_timeout_s = 300.0
    """An actor starts a new Python process, when there are resources for it."""

    def __init__(
        self,
        actor: Any,
        held: HeldObjects,
        label: str,
        on_message: Callable[[Any], None],
        on_end: Callable[[str], None],
        check_there: Callable[[], None] = lambda: None,
    ) -> None:
        self._actor, self._held = actor, held
        self._on_message, self._on_end, self._check_there = on_message, on_end, check_there
        self._decoder = ObjectDecoder(WorkerMessage, held)
        self._hello: Hello | None = None
        self._lock = threading.Lock()  # guards everything below
        self._num_sent = 0
        # Messages that the actor has not confirmed yet, with their last time of sending, by number.
        self._unconfirmed: dict[int, tuple[float, bytes, list[Any]]] = {}
        self._num_resent = 0  # consecutive
        self._kill_reason: str | None = None
        self._is_closed = self._is_over = self._is_killed = False
        self._stream: Any = self._actor.say.remote(0)
        self._thread = threading.Thread(
            target=self._listen, name=f"actor {label}"[:60], daemon=True
        )
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The worker's process id, if it is on this machine."""
        hello = self._hello
        return hello.pid if hello is not None and hello.machine == machine_name() else None

    def send(self, message: Any) -> None:
        """See :class:`~stages.remote.supervisor.Connection`."""
        references: list[Any] = []

        def share(content: NDArray[np.uint8] | Tensor | RemoteBytes) -> Reference | None:
            reference = content.reference if isinstance(content, ObjectBytes) else None
            if reference is None:
                if content.nbytes <= INLINE_BYTES:
                    return None
                reference = _put(plain_bytes(content))
            references.append(reference)
            return Reference(len(references) - 1, content.nbytes)

        self._check_open()
        content = encode(message, share)
        with self._lock:
            self._check_open()
            with _room_for(len(content)):  # Ray puts large arguments into the store, too
                self._actor.take.remote(self._num_sent, content, references)
            self._unconfirmed[self._num_sent] = (time.monotonic(), content, references)
            self._num_sent += 1

    def kill(self, reason: str) -> None:
        """See :class:`~stages.remote.supervisor.Connection`."""
        self._kill_reason = reason
        self._kill()

    def close(self, grace_s: float) -> None:
        """See :class:`~stages.remote.supervisor.Connection`."""
        with self._lock:
            self._is_closed = True
        if not ray.is_initialized():  # any call would start another cluster
            return
        if self._hello is not None and not self._is_over:
            self._held.bring_home_direct()  # objects in the actor are lost with it
            self._actor.end.remote()
            self._thread.join(grace_s)
        self._kill()
        self._thread.join(grace_s)

    def _check_open(self) -> None:
        if self._is_over or self._is_closed or not ray.is_initialized():
            raise ConnectionError("its actor has ended")

    def _kill(self) -> None:
        if not ray.is_initialized():
            return
        with suppress(ValueError):  # raised if Ray does not know the actor any more
            ray.kill(self._actor, no_restart=True)
        # A stopped process does not react, and Ray waits some seconds for it. Kill it only once:
        # the process id may be reused soon.
        pid, self._is_killed = None if self._is_killed or self._is_over else self.pid, True
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _listen(self) -> None:
        try:
            reason = self._receive_all()
        except ray.exceptions.RayError as error:
            reason = _cause_of_death(error)
        except Exception as error:  # of a message handler, or from an invalid message
            _LOG.exception("what an actor said could not be heard")
            reason = f"could not be heard: {described(error)}"
        with self._lock:
            is_closed = self._is_closed
        if not is_closed:
            self._kill()
        self._is_over = True
        self._stream = None
        if not is_closed:
            self._on_end(self._kill_reason or reason)

    def _receive_all(self) -> str:
        """Handle all messages of the actor; return the reason for its end."""
        while not ray.wait([self._stream], timeout=_CHECK_INTERVAL_S)[0]:
            try:
                self._check_there()
            except NoPlaceError as error:
                self.has_no_place = True
                return f"could not be started: {error}"
        items = self._items()
        while True:
            said: object = ray.get(next(items))
            if not isinstance(said, bytes):
                raise ValueError(f"a {type(said).__name__} in the place of a bundle")
            bundle = msgspec.msgpack.decode(said, type=Bundle)
            if bundle.hello is not None:
                if bundle.hello.protocol != PROTOCOL_VERSION:
                    return _refusal(bundle.hello)
                self._hello = bundle.hello
            self._resend_lost(bundle.num_taken)
            if self._num_resent > _MAX_RESENDS:
                return f"did not get what was sent to it {_MAX_RESENDS} times"
            # References to objects that the actor keeps for its readers. A call has to return them:
            # Ray does not count references inside a list that a generator yields, so their objects
            # would be freed before they are read.
            count = sum(map(sum, bundle.is_offered))
            offered = iter(ray.get(self._actor.hand_over.remote(count)) if count else ())
            for content, are_offered in zip(bundle.contents, bundle.is_offered, strict=True):
                references = [next(offered if each else items) for each in are_offered]
                self._on_message(self._decoder.decode(content, references))
            if bundle.ended is not None:
                return bundle.ended

    def _resend_lost(self, num_taken: int) -> None:
        """Resend messages that the actor should have received: Ray repeats not all lost calls."""
        with self._lock:
            for number in [each for each in self._unconfirmed if each < num_taken]:
                del self._unconfirmed[number]
                self._num_resent = 0
            now_s = time.monotonic()
            lost = [
                e for e, (at_s, *_) in self._unconfirmed.items() if now_s - at_s > _RESEND_AFTER_S
            ]
            self._num_resent += bool(lost)
            for number in lost:
                _LOG.debug("message %d to %s is sent again", number, self._thread.name)
                _, content, references = self._unconfirmed[number]
                self._unconfirmed[number] = (now_s, content, references)
                self._actor.take.remote(number, content, references)

    def _items(self) -> Iterator[Any]:
        """Yield references to all items of the actor, call after call."""
        for number in itertools.count():
            yield from self._items_of(number)
            self._stream = self._actor.say.remote(number + 1)

    def _items_of(self, number: int) -> Iterator[Any]:
        """Yield those of one call, which is repeated if it was lost on its way."""
        for attempt in range(_MAX_RESENDS):
            items = iter(self._stream)
            first = next(items, None)
            if first is None:
                return
            try:
                ray.get(first)  # a bundle, which is small
                break
            except ray.exceptions.ActorUnavailableError:
                time.sleep(min(0.05 * 2**attempt, 1.0))
                self._stream = self._actor.say.remote(number)
        yield first
        for item in items:  # noqa: UP028 - Ray's iterator cannot be closed
            yield item


def _refusal(hello: Hello) -> str:
    """Return why an actor is refused, phrased to follow "its worker"."""
    return (
        f"speaks version {hello.protocol} of the protocol, and this process version "
        f"{PROTOCOL_VERSION}: all nodes must have the same release of omni-pipeline installed"
    )


def _put(content: NDArray[np.uint8]) -> Any:
    """Put bytes into the object store, or raise ``MemoryError``."""
    with _room_for(content.nbytes):
        return ray.put(content)


@contextmanager
def _room_for(nbytes: int) -> Iterator[None]:
    """Convert Ray's errors about a full object store into ``MemoryError``."""
    try:
        yield
    except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
        raise MemoryError(
            f"Ray's object store has no room for {nbytes} bytes; give it more: ray start "
            "--object-store-memory"
        ) from error


def _cause_of_death(error: ray.exceptions.RayError) -> str:
    """Return an actor's cause of death, phrased to follow "its worker"."""
    text = str(error).strip()
    found = _EXIT.search(text)
    if found is not None:
        return f"died ({found[1]}: {found[2].strip()})"
    first, last = text.splitlines()[0], text.splitlines()[-1]
    if isinstance(error, ray.exceptions.RayTaskError):
        return f"failed with {last}"
    if "creation task" in text:
        return (
            f"could not begin: {last}; the same release of omni-pipeline has to be installed on "
            "every node"
        )
    return f"died ({first})"
