"""Actors that run the worker of one pipeline after another, so that not every test starts some."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from stages.cluster import actor_worker, reservation
from stages.cluster.actor_worker import PROTOCOL_VERSION, ActorWorker, Hello
from stages.remote.messages import WorkerSpec

__all__ = ["Hosts"]

_GROUPS = {"take": 1, "say": 40}


class _Guest(ActorWorker):
    """A worker whose actor stays when it has ended."""

    def __init__(self, argument: bytes) -> None:
        super().__init__(argument)
        self._hello = Hello(PROTOCOL_VERSION, 0, "nobody's to kill")

    def settle_in(self, spec: WorkerSpec) -> None:
        """The process has other guests, before and after: its log is not told to this one's."""
        torch.set_num_threads(spec.threads)


class _Host:
    """The actor: calls of :class:`ActorWorker`, with whose they are."""

    def __init__(self, inline_bytes: int) -> None:
        vars(actor_worker)["INLINE_BYTES"] = inline_bytes  # the process is the tests' own
        self._guests: dict[str, Any] = {}  # of _Guest, whose methods Ray's types do not call

    @ray.method(concurrency_group="take")
    def receive(self, name: str, argument: bytes) -> None:
        """Begin to run a worker."""
        self._guests = {key: each for key, each in self._guests.items() if not each.is_over}
        self._guests[name] = _Guest(argument)

    @ray.method(concurrency_group="take", num_returns=0)
    def take(self, name: str, number: int, content: bytes, references: list[Any]) -> None:
        self._guests[name].take(number, content, references)

    @ray.method(concurrency_group="take", num_returns=0)
    def end(self, name: str) -> None:
        self._guests[name].end()

    @ray.method(concurrency_group="say", num_returns="streaming")
    def say(self, name: str, number: int) -> Iterator[bytes | NDArray[np.uint8]]:
        yield from self._guests[name].say(number)


class Hosts:
    """In the place of the class of actors: what would be an actor becomes a guest of one.

    Args:
        nodes: ids of those that have a host each, so that what is handed on goes from node to node.
        inline_bytes: what has more is an object of its own; the rows of tests are few.
    """

    def __init__(self, nodes: Sequence[str], inline_bytes: int) -> None:
        remote: Any = ray.remote
        kind = remote(num_cpus=0, concurrency_groups=_GROUPS)(_Host)
        environment = {"env_vars": reservation._environment(1)}
        self._hosts = [
            kind.options(
                runtime_env=environment,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            ).remote(inline_bytes)
            for node in nodes
        ]
        self._next = itertools.cycle(self._hosts)

    def options(self, **options: Any) -> Hosts:
        """What a guest needs of the cluster its host has."""
        return self

    def remote(self, argument: bytes) -> Any:
        """Run a worker."""
        host, name = next(self._next), uuid.uuid4().hex
        ray.get(host.receive.remote(name, argument))
        return _Handle(host, name)


class _Handle:
    """What a link takes for an actor."""

    def __init__(self, host: Any, name: str) -> None:
        for method in ("take", "end", "say"):
            setattr(self, method, _Method(getattr(host, method), name))


class _Method:
    def __init__(self, method: Any, name: str) -> None:
        self._method, self._name = method, name

    def remote(self, *arguments: Any) -> Any:
        return self._method.remote(self._name, *arguments)
