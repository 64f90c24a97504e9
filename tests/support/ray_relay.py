"""Workers in threads of this process whose every message passes through a Ray cluster."""

from __future__ import annotations

import itertools
import queue
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from stages.cluster.actor import PROTOCOL_VERSION, ActorConnection, ActorWorker, Hello
from stages.cluster.object_bytes import HeldObjects
from stages.remote.codec import encode
from stages.remote.messages import WorkerSpec
from stages.remote.supervisor import Connection
from stages.remote.worker import Build
from tests.support.patience import PATIENCE_S


class Relay:
    """An actor that forwards messages from one mailbox to another."""

    def __init__(self) -> None:
        self._boxes: defaultdict[str, queue.SimpleQueue[Any]] = defaultdict(queue.SimpleQueue)
        self._early: defaultdict[str, dict[int, list[Any]]] = defaultdict(dict)
        self._next: defaultdict[str, int] = defaultdict(int)
        self._lock = threading.Lock()

    @ray.method(concurrency_group="put", num_returns=0)
    def put(self, box: str, number: int, items: list[Any]) -> None:
        """Put items into a box; None is the last one."""
        with self._lock:
            queued = self._boxes[box]
        early = self._early[box]
        early[number] = items
        while self._next[box] in early:
            for item in early.pop(self._next[box]):
                queued.put(item)
            self._next[box] += 1

    @ray.method(concurrency_group="give", num_returns="streaming")
    def give(self, box: str, number: int) -> Iterator[Any]:
        """Yield the items of a box, as this actor's own."""
        with self._lock:  # or two calls may create them at once
            items = self._boxes[box]
        while (item := items.get()) is not None:
            yield ray.get(item) if isinstance(item, ray.ObjectRef) else item

    @ray.method(concurrency_group="put", num_returns="streaming")
    def fail(self) -> Iterator[Any]:
        """Raise what Ray raises for a call that was lost in transit."""
        yield from _lost()


def _lost() -> Iterator[Any]:
    raise ray.exceptions.ActorUnavailableError("it was lost", None)


def start_relay(node: str) -> Any:
    """Start an actor in this process's cluster, on the node with that id."""
    groups = {"put": 1, "give": 400}
    remote: Any = ray.remote
    kind = remote(num_cpus=0, concurrency_groups=groups)(Relay)
    return kind.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, False)).remote()


class RelayedWorkers:
    """Starts workers that are reached through a relay, as if they were the relay's."""

    def __init__(
        self, relay: Any, build: Build, loses: Callable[[str, int], bool] = lambda name, at: False
    ) -> None:
        self._relay, self._build, self._loses = relay, build, loses
        self._ends: list[_FarEnd] = []
        self.held = HeldObjects()

    def connect(
        self, spec: WorkerSpec, on_message: Callable[[Any], None], on_end: Callable[[str], None]
    ) -> Connection:
        """See :class:`~stages.remote.supervisor.Connect`."""
        end = _FarEnd(self._relay, uuid.uuid4().hex, spec, self._build)
        end.handle.lose(self._loses)
        self._ends.append(end)
        return _RelayedConnection(end.handle, self.held, spec.label, on_message, on_end)

    def join(self) -> None:
        """Wait for the threads of all workers, which have been told to end, or killed."""
        for end in self._ends:
            for thread in end.threads:
                thread.join(PATIENCE_S)
                assert not thread.is_alive()


class _RelayedConnection(ActorConnection):
    """A connection whose actor ends when it is killed, though no process ends with it."""

    def _kill(self) -> None:
        super()._kill()
        if ray.is_initialized():  # any call to Ray would start another cluster
            self._actor.end.remote()


class _LocalWorker(ActorWorker):
    def __init__(self, argument: bytes, build: Build) -> None:
        super().__init__(argument, build)
        # This process must never be taken for one that can be killed.
        self._hello = Hello(PROTOCOL_VERSION, 0, "elsewhere")

    def settle_in(self, spec: WorkerSpec) -> None:
        """Do nothing: the process is the test's."""


class _FarEnd:
    """Stands in for a link's actor, with the two threads that serve it here."""

    def __init__(self, relay: Any, name: str, spec: WorkerSpec, build: Build) -> None:
        self.relay = relay
        self.down, self.up = _Box(relay, f"{name} down"), _Box(relay, f"{name} up")
        self._worker: Any = _LocalWorker(encode(spec), build)
        self.handle = _Handle(self)
        self.threads = [
            threading.Thread(target=each, daemon=True) for each in (self._serve, self._tell)
        ]
        for thread in self.threads:
            thread.start()

    def _serve(self) -> None:
        for reference in self.down.give(0):
            match ray.get(reference):
                case "end":
                    self._worker.end()
                case (number, content, references):
                    self._worker.take(number, content, references)

    def _tell(self) -> None:
        calls = itertools.count()
        while not self._worker.is_over:
            for said in self._worker.say(next(calls)):
                self.up.put(ray.put(said) if isinstance(said, np.ndarray) else said)
        self.up.put(None)
        self.down.put(None)


class _Box:
    def __init__(self, relay: Any, name: str) -> None:
        self._relay, self._name = relay, name
        self._numbers = itertools.count()

    def put(self, *items: Any) -> None:
        self._relay.put.remote(self._name, next(self._numbers), list(items))

    def give(self, number: int) -> Any:
        return self._relay.give.remote(self._name, number)


class _Handle:
    """Forwards calls of an actor as calls of the relay."""

    def lose(self, loses: Callable[[str, int], bool]) -> None:
        """Make some calls get lost in transit."""
        for name, lost in (("take", lambda: None), ("say", self._fail.remote)):
            method = getattr(self, name).remote
            calls = itertools.count()

            def call(
                *arguments: Any,
                name: str = name,
                lost: Any = lost,
                method: Any = method,
                calls: Iterator[int] = calls,
            ) -> Any:
                return lost() if loses(name, next(calls)) else method(*arguments)

            setattr(self, name, _Method(call))

    def __init__(self, end: _FarEnd) -> None:
        self._fail = end.relay.fail
        self.take = _Method(lambda *arguments: end.down.put(arguments))
        self.end = _Method(lambda: end.down.put("end"))
        self.say = _Method(end.up.give)


class _Method:
    def __init__(self, remote: Callable[..., Any]) -> None:
        self.remote = remote
