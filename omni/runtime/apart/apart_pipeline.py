"""Starts a pipeline in a process of its own."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from engine.interface.cpu_threads import available_cores
from omni.pipelines.graph_rules import check_graph
from omni.pipelines.pipeline import Pipeline
from omni.pipelines.pipeline_config import PipelineConfig
from omni.pipelines.runtime_checks import check_runtime
from omni.runtime.apart.apart_messages import ApartSpec, apart_codec
from omni.runtime.apart.apart_runner import ApartRunner
from omni.runtime.apart.apart_stage import ApartStage
from omni.runtime.placed_pipeline import worker_specs
from stages.remote.connection import Connect, Connection
from stages.remote.fork_server import start_worker
from stages.remote.process_connection import ProcessConnection
from stages.remote.worker_life import WorkerLife, wait_until_built
from stages.remote.worker_main import StageShape

__all__ = ["build_apart", "connect_host", "start_apart"]

_MAIN = "omni.runtime.apart.pipeline_host:host_main"
_FIRST_NUMBER = re.compile(r"\s*([1-9]\d*)\b")


def start_apart(
    config: PipelineConfig, connect: Connect[ApartSpec] | None = None
) -> tuple[Pipeline, ApartRunner]:
    """Build the stages of an inline pipeline in one process, where they run by turns.

    Args:
        config: of the pipeline.
        connect: starts the process; None for :func:`connect_host`.

    Returns:
        The pipeline as its user sees it, and what runs its requests; stopping that ends the
        process.

    Raises:
        ValueError: a stage cannot be built there, or the graph is wrong. Nothing is left running.
    """
    check_runtime(config)
    check_graph(config.stages)
    config.check_speaker()
    names = config.topological_order()
    threads = _threads()
    specs = tuple(spec for name in names for spec in worker_specs(config, name, threads))
    level = logging.getLogger("omni").getEffectiveLevel()
    spec = ApartSpec(config.name, specs, config.speaker, config.voices, threads, level)
    shapes = {name: config.resolved(name) for name in names}
    return build_apart(spec, shapes, config.runtime.stall_timeout_s, connect or connect_host)


def build_apart(
    spec: ApartSpec,
    shapes: Mapping[str, StageShape],
    stall_timeout_s: float,
    connect: Connect[ApartSpec],
) -> tuple[Pipeline, ApartRunner]:
    """The same of what the process is told.

    Args:
        spec: that.
        shapes: what its user knows of the stages beforehand, each after all that feed it.
        stall_timeout_s: seconds without a sign of life after which the process counts as dead.
        connect: starts it.

    Raises:
        ValueError: see :func:`start_apart`.
    """
    life = WorkerLife(spec, connect, stall_timeout_s)
    has_news = threading.Event()
    with ExitStack() as unless_built:
        unless_built.callback(life.close)
        life.tell_news(has_news.set)
        life.start()
        wait_until_built(life, has_news)
        assert life.facts is not None, "it is built"
        facts = life.facts
        stages = [ApartStage(name, shape, facts[name], life) for name, shape in shapes.items()]
        pipeline = Pipeline(stages, speaker=spec.speaker, voices=spec.voices)
        pipeline.close_after_stages(life.close)
        unless_built.pop_all()
    return pipeline, ApartRunner(life)


def connect_host(
    spec: ApartSpec, on_message: Callable[[Any], None], on_end: Callable[[str], None]
) -> Connection:
    """Start the process; see :class:`~stages.remote.connection.Connect`."""
    codec = apart_codec()
    process = start_worker(
        _MAIN, codec.encode(spec), threads=spec.threads, name=f"omni {spec.label}"
    )
    try:
        return ProcessConnection(process, on_message, on_end, codec)
    except BaseException:  # there are no descriptors left, or no threads
        process.sock.close()
        process.kill()
        raise


def _threads() -> int:
    """As many as PyTorch would take in this process, which may not have imported it."""
    given = _FIRST_NUMBER.match(os.environ.get("OMP_NUM_THREADS", ""))
    return int(given[1]) if given else available_cores()
