"""Leaving a cluster."""

from __future__ import annotations

import threading

import pytest
import ray

from stages.cluster import membership


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
