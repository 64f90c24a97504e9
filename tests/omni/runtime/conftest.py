"""The runtimes of the stages of a test's pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from omni.pipelines.pipeline import Pipeline
from omni.runtime import orchestrator
from stages import Stage
from stages.cluster import actor
from stages.remote import supervisor
from stages.remote.worker import Build
from stages.worker.messages import StreamedEdge
from stages.worker.stage_link import StageLink
from tests.support.channel_workers import ChannelWorkers
from tests.support.placed import Anywhere
from tests.support.ray_cluster import SessionCluster
from tests.support.ray_relay import RelayedWorkers
from tests.support.remote_stages import one_stage, remote_stage

_INLINE_BYTES = 16
"""Larger data becomes an object of the cluster, however small the tensors of tests are."""


@pytest.fixture
def anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Anywhere]:
    """Run the stages of every orchestrator inline, or in separate workers.

    Tests that use it are marked by :func:`tests.support.placed.everywhere`.

    With ``processes`` all messages of workers go over sockets and shared memory, as between
    processes; they are threads, which drive the very stages that the test has built. With ``ray``
    they go through an actor and the object store of a cluster, however small they are.
    """
    where: str = request.param
    if where == "inline":
        yield Anywhere(where)
        return
    if where == "ray":
        monkeypatch.setattr(actor, "INLINE_BYTES", _INLINE_BYTES)
    with ExitStack() as workers:

        def link(
            pipeline: Pipeline, stage: Stage, edges: tuple[StreamedEdge, ...], **_: bool
        ) -> StageLink:
            transform = pipeline.transforms.get(stage.name)
            threads = started(lambda spec: (_Unclosed.of(stage), transform))
            specs = [one_stage(stage.name, edges)]
            workers.callback(threads.join)
            placed = remote_stage(stage, specs, threads.connect, max_retries=0)
            workers.callback(placed.close)
            return placed.link

        def started(build: Build) -> ChannelWorkers | RelayedWorkers:
            if where == "processes":
                return ChannelWorkers(build)
            cluster: SessionCluster = request.getfixturevalue("ray_cluster")
            return RelayedWorkers(cluster.relay, build)

        monkeypatch.setattr(orchestrator, "_link", link)
        yield Anywhere(where, workers.close)


@pytest.fixture
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the next worker at once."""
    monkeypatch.setattr(supervisor, "_FIRST_DELAY_S", 0.0)


class _Unclosed:
    """A stage that its test continues to use after its worker has ended."""

    @staticmethod
    def of(stage: Stage) -> Stage:
        stage.close = lambda: None  # type: ignore[method-assign]
        return stage
