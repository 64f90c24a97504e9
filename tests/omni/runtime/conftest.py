"""Where the stages of a test's pipeline run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from omni.pipelines.pipeline import Pipeline
from omni.runtime import stage_links
from stages import Stage
from stages.cluster import actor_connection, actor_worker
from stages.remote.control import WorkerSpec
from stages.remote.remote_stage import StartingStage, WorkerPolicy
from stages.remote.worker_main import Build
from stages.worker.messages import StreamedEdge
from stages.worker.stage_link import StageLink
from tests.support.channel_workers import ChannelWorkers
from tests.support.ray_cluster import SessionCluster
from tests.support.ray_relay import RelayedWorkers


@pytest.fixture(params=["inline", "processes"])
def anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Let the stages of every orchestrator run inline, or in workers of their own.

    With ``processes`` all that workers are told and tell goes over sockets and shared memory, as
    between processes; they are threads, which drive the very stages that the test has made. With
    ``ray``, for which tests are marked by :func:`tests.support.placed.everywhere`, it goes through
    an actor and the object store of a cluster, however small it is.
    """
    where: str = request.param
    if where == "inline":
        yield where
        return
    if where == "ray":
        for module in (actor_connection, actor_worker):
            monkeypatch.setattr(module, "INLINE_BYTES", 16)
    with ExitStack() as workers:

        def link(pipeline: Pipeline, stage: Stage, edges: tuple[StreamedEdge, ...]) -> StageLink:
            transform = pipeline.transforms.get(stage.name)
            threads = started(lambda spec: (_Unclosed.of(stage), transform))
            spec = WorkerSpec(stage.name, "", "", None, edges)
            starting = StartingStage(stage, [spec], threads.connect, WorkerPolicy(max_retries=0))
            workers.callback(threads.join)
            workers.callback(starting.close)
            return starting.wait().link

        def started(build: Build) -> ChannelWorkers | RelayedWorkers:
            if where == "processes":
                return ChannelWorkers(build)
            cluster: SessionCluster = request.getfixturevalue("ray_cluster")
            return RelayedWorkers(cluster.relay, build)

        monkeypatch.setattr(stage_links, "_link", link)
        yield where


class _Unclosed:
    """A stage that its test goes on with after its worker has ended."""

    @staticmethod
    def of(stage: Stage) -> Stage:
        stage.close = lambda: None  # type: ignore[method-assign]
        return stage
