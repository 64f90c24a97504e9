"""Where the stages of a test's pipeline run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from omni.pipelines.pipeline import Pipeline
from omni.runtime import stage_links
from stages import Stage
from stages.remote.control import WorkerSpec
from stages.remote.remote_stage import StartingStage, WorkerPolicy
from stages.worker.messages import StreamedEdge
from stages.worker.stage_link import StageLink
from tests.support.thread_workers import ThreadWorkers


@pytest.fixture(params=["inline", "workers"])
def anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Let the stages of every orchestrator run inline, or in workers that are told by messages.

    The workers' threads drive the very stages that the test has made.
    """
    where: str = request.param
    if where == "inline":
        yield where
        return
    with ExitStack() as workers:

        def link(pipeline: Pipeline, stage: Stage, edges: tuple[StreamedEdge, ...]) -> StageLink:
            transform = pipeline.transforms.get(stage.name)
            threads = ThreadWorkers(lambda spec: (_Unclosed.of(stage), transform))
            spec = WorkerSpec(stage.name, "", "", None, edges)
            starting = StartingStage(stage, [spec], threads.connect, WorkerPolicy(max_retries=0))
            workers.callback(threads.join)
            workers.callback(starting.close)
            return starting.wait().link

        monkeypatch.setattr(stage_links, "_link", link)
        yield where


class _Unclosed:
    """A stage that its test goes on with after its worker has ended."""

    @staticmethod
    def of(stage: Stage) -> Stage:
        stage.close = lambda: None  # type: ignore[method-assign]
        return stage
