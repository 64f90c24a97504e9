"""Objects that a process holds in a cluster, and messages that do not fit into its store."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from stages.cluster import membership
from stages.cluster.actor import ActorConnection
from stages.cluster.object_bytes import HeldObjects, ObjectBytes
from stages.remote.messages import Commands


def reference() -> Any:
    return SimpleNamespace(tensor_transport=lambda: None)


def test_held_objects_may_grow_while_all_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldObjects()
    objects = [ObjectBytes(reference(), 1, held) for _ in range(200)]
    monkeypatch.setattr(ray, "get", lambda _: np.zeros(1, np.uint8))
    is_over = threading.Event()
    more: list[ObjectBytes] = []

    def grow() -> None:
        while not is_over.is_set():
            more.append(ObjectBytes(reference(), 1, held))
            if len(more) > 500:
                more.clear()

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        for _ in range(1000):
            held.bring_home_direct()
        held.bring_home()
    finally:
        is_over.set()
        thread.join()
    assert all(each.reference is None for each in objects)


class _FullStore:
    """An actor whose messages do not fit into the object store."""

    def __init__(self) -> None:
        self.say = SimpleNamespace(remote=lambda _: iter(()))
        self.take = SimpleNamespace(remote=self._refuse)

    def _refuse(self, *_: object) -> None:
        raise ray.exceptions.ObjectStoreFullError("it is full")


def test_a_full_object_store_raises_and_keeps_the_actor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ActorConnection, "_listen", lambda _: None)
    connection = ActorConnection(
        _FullStore(), HeldObjects(), "stage", lambda _: None, lambda _: None
    )
    with pytest.raises(MemoryError, match="Ray's object store has no room for"):
        connection.send(Commands("s", ()))


def test_held_objects_are_copied_before_the_cluster_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asking Ray for an object afterwards would join another or a new cluster."""
    done: list[str] = []
    is_joined, is_left = threading.Event(), threading.Event()

    def bring_home() -> None:
        is_left.wait(0.3)  # time for a thread that does not wait for this one
        done.append("brought home")

    def leave() -> None:
        done.append("left")
        is_left.set()

    monkeypatch.setattr(membership, "check_is_ray", lambda _: None)
    monkeypatch.setattr(membership, "_connect", lambda *_: is_joined.set())
    monkeypatch.setattr(membership, "_CONNECTION", None)
    monkeypatch.setattr(ray, "is_initialized", is_joined.is_set)
    monkeypatch.setattr(ray, "shutdown", leave)
    joined = membership.join("somewhere:1")
    monkeypatch.setattr(joined.held, "bring_home", bring_home)
    joined.leave()
    assert done == ["brought home", "left"]
