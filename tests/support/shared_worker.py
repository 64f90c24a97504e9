"""Pipelines whose stages share one worker, in a thread of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from omni import Omni
from omni.pipelines.pipeline import Pipeline
from omni.pipelines.pipeline_config import PipelineConfig
from omni.runtime import omni as omni_module
from omni.runtime.orchestrator import streamed_edges
from stages import Stage, Transform
from stages.remote.messages import StageSpec
from stages.remote.remote_stage import RemoteStage
from stages.remote.supervisor import WorkerSupervisor, start_workers
from stages.remote.worker import build_stage
from tests.support.channel_workers import ChannelWorkers
from tests.support.patience import PATIENCE_S
from tests.support.remote_stages import several_stages


@contextmanager
def thread_workers() -> Iterator[ChannelWorkers]:
    """Run workers as threads instead of processes; afterwards they have ended."""
    workers = ChannelWorkers(build_stage)
    with patch.object(omni_module, "connect_process", workers.connect):
        yield workers
    workers.join()


@contextmanager
def apart(config: PipelineConfig) -> Iterator[tuple[Omni, ChannelWorkers]]:
    """Start a pipeline whose stages share a worker; yield it and all its workers so far."""
    with thread_workers() as workers, Omni(config, apart=True) as omni:
        yield omni, workers


def omni_apart(
    *stages: Stage, make: Callable[[], Sequence[Stage]] | None = None, max_retries: int = 0
) -> Omni:
    """Start an ``Omni`` whose stages share a worker."""
    plain = Pipeline(stages)
    edges = streamed_edges(plain.stages)
    left: list[Stage] = []

    def build(spec: StageSpec) -> tuple[Stage, Transform | None]:
        if not left:
            left.extend(stages if make is None else make())
        (stage,) = (each for each in left if each.name == spec.name)
        left.remove(stage)
        return stage, plain.transforms.get(spec.name)

    spec = several_stages("made", [(name, edges[name]) for name in plain.order])
    workers = start_workers([spec], ChannelWorkers(build).connect, PATIENCE_S)
    return Omni(Pipeline([RemoteStage(each.name, each, workers, max_retries) for each in stages]))


def worker_of(omni: Omni) -> WorkerSupervisor:
    """Return the worker of a pipeline whose stages share one."""
    (worker,) = {
        worker
        for stage in omni.pipeline.stages.values()
        if isinstance(stage, RemoteStage)
        for worker in stage.workers
    }
    return worker
