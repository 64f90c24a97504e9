"""A worker in an actor of a Ray cluster, and the way to it."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import numpy as np
import ray
from numpy.typing import NDArray
from torch import Tensor

from engine.interface.log_fields import package_logger
from engine.interface.placed_error import described
from stages.cluster.actor_worker import PROTOCOL_VERSION, Bundle, Hello, machine_name
from stages.cluster.object_bytes import HeldObjects, ObjectBytes, ObjectDecoder
from stages.remote.codec import INLINE_BYTES, Reference, encode, plain_bytes
from stages.remote.messages import WorkerMessage
from stages.remote.shared_memory import RemoteBytes
from stages.remote.supervisor import Connection, NoPlaceError

_LOG = package_logger(__name__)
_EXIT = re.compile(r"Worker exit type: (\w+) Worker exit detail: ([^.\n]*)")
_LOST_AFTER_S = 3.0
"""A message that an actor which speaks has not got by then is sent again."""

_MOST_RESENT = 20
"""Times in a row, before an actor that gets nothing is given up."""

_CHECKED_EACH_S = 1.0
"""Whether an actor that has not spoken yet still has a place."""


class ActorConnection(Connection):
    """Speaks with an actor, a handle of :class:`~stages.cluster.actor_worker.ActorWorker`.

    Args:
        on_message, on_end: see :data:`~stages.remote.supervisor.Connect`.
        check_there: called from time to time until the actor speaks; raises ``NoPlaceError`` where
            the cluster has no place for it any more, for which Ray would wait without end.
    """

    start_patience_s = 300.0
    """An actor begins with a Python of its own, when there is room for it."""

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
        self._lock = threading.Lock()  # over all below
        self._num_sent = 0
        # By number, what the actor has not confirmed yet, and when it was sent last.
        self._unconfirmed: dict[int, tuple[float, bytes, list[Any]]] = {}
        self._num_resent = 0  # times in a row
        self._killed_for: str | None = None
        self._is_closed = self._is_over = self._is_killed = False
        self._said: Any = self._actor.say.remote(0)
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
            with _room_for(len(content)):  # Ray puts a large one into the store, too
                self._actor.take.remote(self._num_sent, content, references)
            self._unconfirmed[self._num_sent] = (time.monotonic(), content, references)
            self._num_sent += 1

    def kill(self, reason: str) -> None:
        """See :class:`~stages.remote.supervisor.Connection`."""
        self._killed_for = reason
        self._kill()

    def close(self, grace_s: float) -> None:
        """See :class:`~stages.remote.supervisor.Connection`."""
        with self._lock:
            self._is_closed = True
        if not ray.is_initialized():  # to ask for anything would begin another cluster
            return
        if self._hello is not None and not self._is_over:
            self._held.bring_home_direct()  # what is in the actor goes with it
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
        with suppress(ValueError):  # what Ray raises of an actor that it knows no more
            ray.kill(self._actor, no_restart=True)
        # A process that is stopped hears nothing, and Ray waits some seconds for it. Only once:
        # the id may be another process's soon.
        pid, self._is_killed = None if self._is_killed or self._is_over else self.pid, True
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _listen(self) -> None:
        try:
            reason = self._hear_all()
        except ray.exceptions.RayError as error:
            reason = _told(error)
        except Exception as error:  # of a handler of messages, or of what was said
            _LOG.exception("what an actor said could not be heard")
            reason = f"could not be heard: {described(error)}"
        with self._lock:
            is_closed = self._is_closed
        if not is_closed:
            self._kill()
        self._is_over = True
        self._said = None
        if not is_closed:
            self._on_end(self._killed_for or reason)

    def _hear_all(self) -> str:
        """Hear what the actor says until the last word; what ended it."""
        while not ray.wait([self._said], timeout=_CHECKED_EACH_S)[0]:
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
            self._send_again(bundle.num_taken)
            if self._num_resent > _MOST_RESENT:
                return f"did not get what was sent to it {_MOST_RESENT} times"
            offered = self._fetch_offers(sum(map(sum, bundle.is_offered)))
            for content, are_offered in zip(bundle.contents, bundle.is_offered, strict=True):
                references = [next(offered if each else items) for each in are_offered]
                self._on_message(self._decoder.decode(content, references))
            if bundle.ended is not None:
                return bundle.ended

    def _fetch_offers(self, count: int) -> Iterator[Any]:
        """References to what the actor keeps for its readers.

        Those that a generator yields inside of a list are not counted by Ray, and what they stand
        for is gone before it is read; those that a call returns are.
        """
        return iter(ray.get(self._actor.hand_over.remote(count)) if count else ())

    def _send_again(self, num_taken: int) -> None:
        """Send again what an actor should have got: Ray repeats lost calls, but not always."""
        with self._lock:
            for number in [each for each in self._unconfirmed if each < num_taken]:
                del self._unconfirmed[number]
                self._num_resent = 0
            now_s = time.monotonic()
            lost = [
                e for e, (at_s, *_) in self._unconfirmed.items() if now_s - at_s > _LOST_AFTER_S
            ]
            self._num_resent += bool(lost)
            for number in lost:
                _LOG.debug("message %d to %s is sent again", number, self._thread.name)
                _, content, references = self._unconfirmed[number]
                self._unconfirmed[number] = (now_s, content, references)
                self._actor.take.remote(number, content, references)

    def _items(self) -> Iterator[Any]:
        """References to all that the actor yields, call after call."""
        for number in itertools.count():
            yield from self._items_of(number)
            self._said = self._actor.say.remote(number + 1)

    def _items_of(self, number: int) -> Iterator[Any]:
        """The same of one call, which is made again if it was lost on its way."""
        for attempt in range(_MOST_RESENT):
            items = iter(self._said)
            first = next(items, None)
            if first is None:
                return
            try:
                ray.get(first)  # short: a bundle
                break
            except ray.exceptions.ActorUnavailableError:
                time.sleep(min(0.05 * 2**attempt, 1.0))
                self._said = self._actor.say.remote(number)
        yield first
        for item in items:  # noqa: UP028 - Ray's iterator cannot be closed
            yield item


def _refusal(hello: Hello) -> str:
    """Why an actor is not listened to, in words that go on after "its worker"."""
    return (
        f"speaks version {hello.protocol} of the protocol, and this process version "
        f"{PROTOCOL_VERSION}: all nodes must have the same release of omni-pipeline installed"
    )


def _put(content: NDArray[np.uint8]) -> Any:
    """Place bytes in the object store, or raise ``MemoryError``."""
    with _room_for(content.nbytes):
        return ray.put(content)


@contextmanager
def _room_for(nbytes: int) -> Iterator[None]:
    """Raise what Ray raises of a full store as ``MemoryError``."""
    try:
        yield
    except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
        raise MemoryError(
            f"Ray's object store has no room for {nbytes} bytes; give it more: ray start "
            "--object-store-memory"
        ) from error


def _told(error: ray.exceptions.RayError) -> str:
    """What an actor died of, in words that go on after "its worker"."""
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
