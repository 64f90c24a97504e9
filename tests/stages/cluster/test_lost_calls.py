"""Calls lost on the way to an actor are retried a limited number of times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from omni import Omni
from omni.pipelines.pipeline import Pipeline
from stages.cluster import actor
from tests.support.fake_stage import FakeStage
from tests.support.ray_cluster import SessionCluster
from tests.support.ray_relay import RelayedWorkers
from tests.support.remote_stages import one_stage, remote_stage


@contextmanager
def lossy(cluster: SessionCluster, loses: Callable[[str, int], bool]) -> Iterator[Omni]:
    """Run a stage some of whose calls to its worker are lost."""
    workers = RelayedWorkers(cluster.relay, lambda spec: (FakeStage("a"), None), loses)
    stage = remote_stage(FakeStage("a"), [one_stage("a")], workers.connect, max_retries=0)
    with Omni(Pipeline([stage])) as omni:
        yield omni
    workers.join()


def test_a_lost_command_is_resent(
    ray_cluster: SessionCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "_RESEND_AFTER_S", 0.05)
    with lossy(ray_cluster, lambda name, at: name == "take" and at in (0, 2, 3, 5)) as omni:
        for word in ("one", "two", "three"):
            (output,) = omni.generate(word)
            assert output.stages["a"].text == f"a({word})"
        assert omni.stats()["a"].num_restarts == 0


def test_a_lost_answer_is_requested_again(ray_cluster: SessionCluster) -> None:
    with lossy(ray_cluster, lambda name, at: name == "say" and at in (0, 1, 2)) as omni:
        (output,) = omni.generate("one")
        assert output.stages["a"].text == "a(one)"
        assert omni.stats()["a"].num_restarts == 0


def test_an_actor_that_receives_nothing_is_given_up(
    ray_cluster: SessionCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "_RESEND_AFTER_S", 0.05)
    monkeypatch.setattr(actor, "_MAX_RESENDS", 2)
    with lossy(ray_cluster, lambda name, at: name == "take") as omni:
        (output,) = omni.generate("one")
    assert output.error == (
        "stage 'a': its worker did not get what was sent to it 2 times while it had this request; "
        "it was run once"
    )


def test_an_actor_can_be_ended_before_its_first_message(ray_cluster: SessionCluster) -> None:
    workers = RelayedWorkers(ray_cluster.relay, lambda spec: (FakeStage("a"), None))
    spec = one_stage("a")
    for end in (lambda each: each.close(0.0), lambda each: each.kill("it is not needed")):
        end(workers.connect(spec, lambda message: None, lambda reason: None))
    workers.join()
