"""Builds a pipeline where its configuration says that its stages run."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from engine.interface.cpu_threads import available_cores
from omni.pipelines.graph_rules import check_graph
from omni.pipelines.pipeline import Pipeline
from omni.pipelines.pipeline_config import PipelineConfig
from omni.pipelines.runtime_checks import check_runtime
from omni.pipelines.runtime_config import (
    RuntimeConfig,
    placement_for,
    resolve_threads,
    stages_by_worker,
)
from omni.runtime.orchestrator import streamed_edges
from stages import StageConfig
from stages.cluster.cluster_address import find_cluster
from stages.portable import check_portable, import_name, portable_transform
from stages.remote.messages import StageSpec, WorkerSpec
from stages.remote.remote_stage import RemoteStage
from stages.remote.supervisor import Connect, connect_process, start_workers


def build_pipeline(
    config: PipelineConfig, *, apart: bool = False, is_traced: bool = False
) -> Pipeline:
    """Build a pipeline; its stages are in this process, or in workers that are started for them.

    Raises:
        ValueError: a stage cannot be built, or the graph is wrong. Nothing is left running.
    """
    check_runtime(config)
    is_inline = config.runtime.kind == "inline"
    if is_inline and not apart:
        return Pipeline.from_config(config)
    if is_inline:
        check_portable(config.stages)
    check_graph(config.stages, emitted=config.emitted())
    config.check_speaker()
    specs = _worker_specs(config, is_traced=is_traced)
    with ExitStack() as built:
        connect, close = _connect(config)
        built.callback(close)
        workers = start_workers(specs, connect, config.runtime.stall_timeout_s)
        for worker in workers:
            built.callback(worker.close)
        stages = [
            RemoteStage(
                name,
                config.resolved(name),
                [worker for worker in workers if name in worker.ports],
                config.runtime.max_retries,
            )
            for name in config.topological_order()
        ]
        pipeline = Pipeline(stages, speaker=config.speaker, voices=config.voices)
        pipeline.close_after_stages(built.pop_all().close)
    return pipeline


def place_pipeline(
    pipeline: Pipeline, runtime: str | RuntimeConfig, *, is_traced: bool = False
) -> Pipeline:
    """Let a pipeline that was composed of stages run elsewhere.

    Its stages are closed, which frees what they hold, and rebuilt where they are to run, with
    caching as it was set.

    Raises:
        ValueError: a stage or a transform cannot be found by another process, and the pipeline is
            as it was; or a stage cannot be built there.
        RuntimeError: the pipeline belongs to an ``Omni``, or is closed.
    """
    config = RuntimeConfig.parse(runtime)
    if config.kind == "inline":
        for name, stage in pipeline.stages.items():
            if isinstance(stage.built_of, StageConfig):
                placement_for(name, stage.built_of.placement, config.kind)
        return pipeline
    described = _described(pipeline, config)
    check_runtime(described)
    caching = {name: stage.enable_prefix_caching for name, stage in pipeline.stages.items()}
    # Raises if an Omni has the pipeline already, which then goes on with it.
    pipeline.ownership.claim(described, "the workers that its stages are built in")
    pipeline.close()
    placed = build_pipeline(described, is_traced=is_traced)
    try:
        for name, stage in placed.stages.items():
            if stage.enable_prefix_caching != caching[name]:
                stage.enable_prefix_caching = caching[name]
    except BaseException:
        placed.close()
        raise
    return placed


def _described(pipeline: Pipeline, runtime: RuntimeConfig) -> PipelineConfig:
    """What a pipeline was composed of, to run elsewhere; what only another runtime has is left out.

    Raises:
        ValueError: a stage cannot say what it was built of, such as one that was given an engine;
            or its name is none that a pipeline's file could have.
    """
    stages: dict[str, Any] = {}
    for name, stage in pipeline.stages.items():
        try:
            settings = stage.configuration()
        except ValueError as error:
            raise ValueError(f"stage {name!r}: {error}") from error
        if isinstance(settings, StageConfig):
            placement = placement_for(name, settings.placement, runtime.kind)
            settings = settings.model_copy(update={"placement": placement})
        stages[name] = settings
    return PipelineConfig(
        name="composed",
        speaker=pipeline.speaker,
        voices=pipeline.voices.given,
        runtime=runtime,
        stages=stages,
    )


def _connect(config: PipelineConfig) -> tuple[Connect, Callable[[], object]]:
    """What starts workers, and what is to be called when all have ended.

    Only what is asked for is imported.

    Raises:
        ValueError: the cluster cannot be joined, or does not have what the stages ask for.
    """
    if config.runtime.kind != "ray":
        return connect_process, lambda: None
    from stages.cluster.direct_transport import check_transport
    from stages.cluster.reservation import Reservation

    placements = config.placements
    if config.runtime.direct_transport is not None:
        has_gpus = any(placement.reserved_gpus for placement in placements.values())
        check_transport(config.runtime.direct_transport, has_gpus=has_gpus)
    reservation = Reservation(find_cluster(config.runtime.address), placements)
    return reservation.connect, reservation.close


_FIRST_NUMBER = re.compile(r"\s*([1-9]\d*)\b")


def _threads_of_torch() -> int:
    """As many as PyTorch would take in this process, which may not have imported it."""
    given = _FIRST_NUMBER.match(os.environ.get("OMP_NUM_THREADS", ""))
    return int(given[1]) if given else available_cores()


def _worker_specs(config: PipelineConfig, *, is_traced: bool) -> list[WorkerSpec]:
    """Specify a pipeline's workers: one, if it is inline.

    Raises:
        ValueError: no other process would find a transform.
    """
    order = config.topological_order()
    if config.runtime.kind == "inline":
        workers = [(config.name, order, _threads_of_torch())]
    else:
        threads = _threads(config)
        workers = []
        for worker, names in stages_by_worker(config.placements):
            open_names = [name for name in names if config.stages[name].placement.threads is None]
            count = max(threads[name] for name in open_names or names)
            workers.append((worker, [name for name in order if name in names], count))
    specs = []
    for worker, names, count in workers:
        num_replicas = len(config.stages[names[0]].placement.all_devices)
        specs += [
            WorkerSpec(
                name=worker,
                stages=tuple(_stage_spec(config, name, replica) for name in names),
                replica=replica,
                num_replicas=num_replicas,
                threads=count,
                is_traced=is_traced,
                log_level=logging.getLogger("omni").getEffectiveLevel(),
                tensor_transport=config.runtime.direct_transport,
            )
            for replica in range(num_replicas)
        ]
    return specs


def _threads(config: PipelineConfig) -> dict[str, int]:
    """For every stage the threads of each of its workers."""
    if config.runtime.kind == "ray":
        return {name: each.actor_threads for name, each in config.placements.items()}
    return resolve_threads(config.placements, available_cores())


def _stage_spec(pipeline: PipelineConfig, name: str, replica: int) -> StageSpec:
    config, transform = pipeline.resolved(name, replica), None
    if config.inputs is not None:
        transform = portable_transform(config.inputs.transform)
        inputs = replace(config.inputs, transform=transform)
        config = config.model_copy(update={"inputs": inputs})
    return StageSpec(
        name=name,
        config=config.model_dump_json(by_alias=True),
        kind=import_name(type(config)),
        transform=transform,
        edges=streamed_edges(pipeline.stages)[name],
        is_shown=bool({"tensors", "audio"}.intersection(config.final_output)),
    )
