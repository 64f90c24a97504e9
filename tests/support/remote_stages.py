"""Stages in separate workers, without a pipeline's configuration."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

from omni import Omni
from stages import Stage
from stages.remote.messages import StageSpec, WorkerSpec
from stages.remote.remote_stage import RemoteStage
from stages.remote.supervisor import Connect, start_workers
from stages.worker.messages import StreamedEdge


def several_stages(
    name: str, stages: Sequence[tuple[str, tuple[StreamedEdge, ...]]], **options: Any
) -> WorkerSpec:
    """Return a worker of stages built by the test, by name with the edges that leave each."""
    specs = tuple(StageSpec(stage, "", "", None, edges) for stage, edges in stages)
    return WorkerSpec(name, specs, **options)


def one_stage(name: str, edges: tuple[StreamedEdge, ...] = (), **options: Any) -> WorkerSpec:
    """Return a worker of one stage built by the test."""
    return several_stages(name, [(name, edges)], **options)


def pids_of(omni: Omni, name: str) -> list[int]:
    """Return the processes of the workers of a stage."""
    stage = omni.pipeline.stages[name]
    assert isinstance(stage, RemoteStage)
    return [pid for worker in stage.workers if (pid := worker.pid) is not None]


def kill_workers(omni: Omni, name: str) -> None:
    """Kill the processes of a stage."""
    for pid in pids_of(omni, name):
        os.kill(pid, signal.SIGKILL)


def remote_stage(
    shape: Stage,
    specs: Sequence[WorkerSpec],
    connect: Connect,
    max_retries: int = 1,
    stall_timeout_s: float = 120.0,
) -> RemoteStage:
    """Start workers of a stage, and wait until they have built it."""
    workers = start_workers(specs, connect, stall_timeout_s)
    return RemoteStage(shape.name, shape, workers, max_retries)
