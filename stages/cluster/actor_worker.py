"""The worker of stages in an actor of a Ray cluster, and the first words that it says."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
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
from stages.cluster.object_bytes import ObjectDecoder
from stages.remote.codec import INLINE_BYTES, Decoder, Reference, encode, plain_bytes
from stages.remote.messages import LinkMessage, StageSpec, WorkerMessage, WorkerSpec
from stages.remote.shared_memory import RemoteBytes
from stages.remote.worker import Build, WorkerLoop, build_stage, log_fields_of
from stages.remote.worker_log import forward_log
from stages.stage import Stage, Transform

PROTOCOL_VERSION = 10
"""Of all that actors and their links say to each other. One that speaks another is refused."""

_MOST_ITEMS = 4096
"""Of one call of :meth:`ActorWorker.say`: Ray keeps an account of them until it ends."""

_MOST_AT_ONCE = 64

_LOG = package_logger(__name__)


class Hello(msgspec.Struct, frozen=True):
    """The first words of an actor: its protocol, its process, and the machine of that."""

    protocol: int
    pid: int
    machine: str


class Bundle(msgspec.Struct, frozen=True):
    """What an actor says at once. After it come the objects beside its messages, in order.

    Attributes:
        is_offered: of each message, for all that is beside it, whether it is to be fetched
            directly; what is not comes after the bundle.
        num_taken: messages to the actor that have come so far, without a gap.
        ended: what ended the worker; nothing comes after it.
    """

    contents: list[bytes] = []
    is_offered: list[list[bool]] = []
    num_taken: int = 0
    hello: Hello | None = None
    ended: str | None = None


_Beside: TypeAlias = "NDArray[np.uint8] | Tensor"
"""What a message refers to by number. Tensors go directly from actor to actor."""


class ActorWorker:
    """Drives stages by commands, and reports events. ::

        link ── take(number, bytes, references) ──► in order ──► WorkerLoop, in a thread of its own
        link ◄── say(): bytes, then the objects beside them ◄── outbox ◄──┘
        link ◄── hand_over(): references to what is here, where the transport is a direct one

    What :meth:`say` yields belongs to the process that called it: it stays in the object store when
    this actor dies, for as long as somebody has a reference to it.

    Args:
        argument: the :class:`~stages.remote.messages.WorkerSpec`.
    """

    def __init__(self, argument: bytes, build: Build = build_stage) -> None:
        spec: WorkerSpec = Decoder(WorkerSpec).decode(argument)
        self._decoder = ObjectDecoder(LinkMessage)
        # Messages with what is beside them; in the end, and once more maybe, what ended the worker.
        self._outbox: queue.SimpleQueue[tuple[bytes, list[_Beside]] | str] = queue.SimpleQueue()
        self._ended: str | None = None
        self._num_taken = 0
        self._early: dict[int, Any] = {}  # messages that wait for one before them, by number
        self._build = build
        self._offers = None if spec.tensor_transport is None else Offers(spec.tensor_transport)
        self._is_shown = any(stage.is_shown for stage in spec.stages)
        self._loop = WorkerLoop(spec, self._send, self._build_checked)
        self._lock = threading.Lock()  # over the next one
        self._num_said = 0
        self._hello: Hello | None = Hello(PROTOCOL_VERSION, os.getpid(), machine_name())
        self._thread = threading.Thread(
            target=self._run, args=(spec,), name=f"stage {spec.label}", daemon=True
        )
        self._thread.start()

    # A call that is lost on its way is made again, perhaps twice: by Ray, or else by the link.
    @ray.method(concurrency_group="take", num_returns=0, max_task_retries=-1)
    def take(self, number: int, content: bytes, references: list[Any]) -> None:
        """Take a message before which ``number`` were sent; one that came before is ignored."""
        if number < self._num_taken or number in self._early:
            return
        try:
            if references:  # fetched here, so that no step waits for the network
                ray.wait(references, num_returns=len(references), fetch_local=True)
            self._early[number] = self._decoder.decode(content, references)
            while self._num_taken in self._early:
                self._loop.take(self._early.pop(self._num_taken))
                self._num_taken += 1
        except Exception as error:  # no caller waits for this call; the link gets it
            _LOG.exception("a message could not be taken")
            self._end_outbox(f"could not take a message: {described(error)}")
            self._loop.end()

    @ray.method(concurrency_group="take", num_returns=0, max_task_retries=-1)
    def end(self) -> None:
        """Have the worker end after its turn."""
        self._loop.end()

    @ray.method(concurrency_group="say", num_returns="streaming")
    def say(self, number: int) -> Iterator[bytes | NDArray[np.uint8]]:
        """Yield what the worker says, as it says it: a bundle, then what is beside its messages.

        It ends after the last word, and after so many items that it is time for another call.

        Args:
            number: of calls that came to their end before.

        Raises:
            RuntimeError: such a call was made before: it has been repeated, and both came.
        """
        with self._lock:
            if number != self._num_said:
                raise RuntimeError(f"call {number} came twice")
            self._num_said += 1
        num_items = 0
        ended = None
        while num_items < _MOST_ITEMS and ended is None:
            bundle, beside = self._next_bundle()
            ended = bundle.ended
            num_items += 1 + len(beside)
            yield msgspec.msgpack.encode(bundle)
            while beside:  # nothing is kept while the next ones are waited for
                yield beside.popleft()

    @ray.method(concurrency_group="hand over")
    def hand_over(self, count: int) -> list[Any]:
        """References to the next tensors that bundles have announced."""
        assert self._offers is not None, "nothing was offered"
        return self._offers.hand_over(count)

    def _next_bundle(self) -> tuple[Bundle, deque[NDArray[np.uint8]]]:
        hello, self._hello = self._hello, None
        if hello is not None:
            return Bundle(hello=hello), deque()
        messages: list[tuple[bytes, list[_Beside]]] = []
        ended = None
        while ended is None and (not messages or not self._outbox.empty()):
            match self._outbox.get():
                case str(reason):
                    ended = reason
                    self._outbox.put(reason)  # for another call
                case message:
                    messages.append(message)
            if len(messages) == _MOST_AT_ONCE:
                break
        contents = [each for _, beside in messages for each in beside]
        if self._offers is not None:
            self._offers.add([each for each in contents if isinstance(each, Tensor)])
        bundle = Bundle(
            [content for content, _ in messages],
            [[isinstance(each, Tensor) for each in beside] for _, beside in messages],
            num_taken=self._num_taken,
            ended=ended,
        )
        return bundle, deque(each for each in contents if not isinstance(each, Tensor))

    @property
    def is_over(self) -> bool:
        """Whether the worker has ended."""
        return not self._thread.is_alive()

    def settle_in(self, spec: WorkerSpec) -> None:
        """Make the process the worker's own, from the thread that will step."""
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
        beside: list[_Beside] = []
        # What its user gets has to outlive this actor.
        offers = None if self._is_shown else self._offers

        def share(content: NDArray[np.uint8] | Tensor | RemoteBytes) -> Reference | None:
            offered = None if offers is None else offers.made_of(content)
            if offered is None and content.nbytes <= INLINE_BYTES:
                return None
            beside.append(plain_bytes(content) if offered is None else offered)
            return Reference(len(beside) - 1, content.nbytes)

        encoded = encode(message, share)
        if self._ended is not None:
            raise ConnectionError(f"the actor has ended: {self._ended}")
        self._outbox.put((encoded, beside))


def machine_name() -> str:
    """Equal in processes that see each other's process ids, and in no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # not on Linux; then no other process is taken for a neighbour
        return f"unknown {os.getpid()}"
