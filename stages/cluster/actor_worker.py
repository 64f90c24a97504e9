"""What an actor of a Ray cluster runs: one stage's worker."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.interface.log_fields import package_logger
from engine.interface.placed_error import described
from stages.cluster.actor_messages import (
    Bundle,
    Hello,
    InOrder,
    Outbox,
    OutgoingMessage,
)
from stages.cluster.direct_transport import Offers
from stages.cluster.object_bytes import ObjectDecoder
from stages.remote.codec import INLINE_BYTES, Decoder, Reference, encode, plain_bytes
from stages.remote.messages import LinkMessage, StageSpec, WorkerMessage, WorkerSpec
from stages.remote.shared_memory import RemoteBytes
from stages.remote.worker import Build, WorkerLoop, build_stage, log_fields_of
from stages.remote.worker_log import forward_log
from stages.stage import Stage, Transform

__all__ = ["PROTOCOL_VERSION", "ActorWorker", "machine_name"]

PROTOCOL_VERSION = 9
"""Of all that actors and their links say to each other. One that speaks another is refused."""

_MOST_ITEMS = 4096
"""Of one call of :meth:`ActorWorker.say`: Ray keeps an account of them until it ends."""

_LOG = package_logger(__name__)


class ActorWorker:
    """Drives stages by commands, and reports events. ::

        link ── take(number, bytes, references) ──► in order ──► WorkerLoop, in a thread of its own
        link ◄── say(): bytes, then the objects beside them ◄── outbox ◄──┘
        link ◄── hand_over(): references to what is here, where the transport is a direct one

    What :meth:`say` yields belongs to the process that called it: it stays in the object store when
    this actor dies, for as long as somebody has a reference to it.

    Args:
        argument: the :class:`~stages.remote.messages.WorkerSpec`.
        build: see :class:`~stages.remote.worker.WorkerLoop`.
    """

    def __init__(self, argument: bytes, build: Build = build_stage) -> None:
        spec: WorkerSpec = Decoder(WorkerSpec).decode(argument)
        self._decoder = ObjectDecoder(LinkMessage)
        self._outbox = Outbox()
        self._inbox: InOrder[Any] = InOrder()
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
        """Take a message; one that has come before comes to nothing.

        Args:
            number: how many were sent before it.
            content: the message.
            references: the objects beside it.
        """
        if number in self._inbox:
            return
        try:
            if references:  # fetched here, so that no step waits for the network
                ray.wait(references, num_returns=len(references), fetch_local=True)
            message = self._decoder.decode(content, references)
            for each in self._inbox.put(number, message):
                self._loop.take(each)
        except Exception as error:  # no caller waits for this call; the link gets it
            _LOG.exception("a message could not be taken")
            self._outbox.end(f"could not take a message: {described(error)}")
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
        messages, ended = self._outbox.take()
        contents = [each for message in messages for each in message.beside]
        if self._offers is not None:
            self._offers.add([each for each in contents if isinstance(each, Tensor)])
        beside = deque(each for each in contents if not isinstance(each, Tensor))
        bundle = Bundle(
            [message.content for message in messages],
            [[isinstance(each, Tensor) for each in message.beside] for message in messages],
            num_taken=self._inbox.num_given,
            ended=ended,
        )
        return bundle, beside

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
            self._outbox.end(reason)

    def _send(self, message: WorkerMessage) -> None:
        beside: list[NDArray[np.uint8] | Tensor] = []
        # What its user gets has to outlive this actor.
        offers = None if self._is_shown else self._offers

        def share(content: NDArray[np.uint8] | Tensor | RemoteBytes) -> Reference | None:
            offered = None if offers is None else offers.made_of(content)
            if offered is None and content.nbytes <= INLINE_BYTES:
                return None
            beside.append(plain_bytes(content) if offered is None else offered)
            return Reference(len(beside) - 1, content.nbytes)

        encoded = encode(message, share)
        self._outbox.put(OutgoingMessage(encoded, tuple(beside)))


def machine_name() -> str:
    """Equal in processes that see each other's process ids, and in no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # not on Linux; then no other process is taken for a neighbour
        return f"unknown {os.getpid()}"
