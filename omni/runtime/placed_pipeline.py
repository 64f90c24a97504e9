"""Builds a pipeline where its configuration says that its stages run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from pydantic import ValidationError

from engine.interface.cpu_threads import available_cores
from engine.interface.schema_error import explain_validation_error
from engine.interface.settings import Settings
from omni.pipelines.graph_rules import check_graph
from omni.pipelines.pipeline import Pipeline
from omni.pipelines.pipeline_config import PipelineConfig
from omni.pipelines.runtime_checks import check_runtime
from omni.pipelines.runtime_config import RuntimeConfig, placement_for, resolve_threads
from stages import StageConfig
from stages.cluster.membership import find_cluster
from stages.portable import import_name, portable_transform
from stages.remote.connection import Connect
from stages.remote.control import WorkerSpec
from stages.remote.remote_stage import StartingStage, WorkerPolicy
from stages.worker.messages import StreamedEdge

__all__ = ["build_pipeline", "place_pipeline", "worker_specs"]


def build_pipeline(
    config: PipelineConfig, connect: Connect[WorkerSpec] | None = None, *, is_traced: bool = False
) -> Pipeline:
    """Build a pipeline; its stages are in this process, or in workers that are started for them.

    Args:
        config: ``config.runtime`` says which.
        connect: starts a worker; None takes what the runtime is made for.
        is_traced: whether workers tell what they do when.

    Raises:
        ValueError: a stage cannot be built, or the graph is wrong. Nothing is left running.
    """
    check_runtime(config)
    if config.runtime.kind == "inline" and connect is None:
        return Pipeline.from_config(config)
    check_graph(config.stages, emitted=config.emitted())
    config.check_speaker()
    policy = WorkerPolicy(config.runtime.max_retries, config.runtime.stall_timeout_s)
    names = config.topological_order()
    threads = _threads(config)
    with ExitStack() as built:
        ground = _Ground(connect) if connect is not None else _ground(config)
        built.callback(ground.close)
        connect = ground.connect
        starting = {}
        for name in names:
            specs = worker_specs(config, name, threads[name], is_traced=is_traced)
            starting[name] = StartingStage(config.resolved(name), specs, connect, policy)
            built.callback(starting[name].close)
        stages = []
        for name in names:
            try:
                stages.append(starting[name].wait())
            except ValueError as error:
                raise ValueError(f"stage {name!r}: {error}") from error
        pipeline = Pipeline(stages, speaker=config.speaker, voices=config.voices)
        pipeline.close_after_stages(ground.close)
        built.pop_all()
    return pipeline


def place_pipeline(
    pipeline: Pipeline, runtime: str | RuntimeConfig, *, is_traced: bool = False
) -> Pipeline:
    """Let a pipeline that was composed of stages run elsewhere.

    Its stages are closed, which frees what they hold, and built anew where they are to run, with
    caching as it was set.

    Args:
        pipeline: no ``Omni`` or orchestrator may have it yet.
        runtime: see :meth:`~omni.pipelines.runtime_config.RuntimeConfig.parse`; ``inline`` leaves
            the pipeline as it is, and a warning tells what its stages ask for in vain.
        is_traced: whether workers tell what they do when.

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
    stages: dict[str, Settings] = {}
    for name, stage in pipeline.stages.items():
        try:
            settings = stage.configuration()
        except ValueError as error:
            raise ValueError(f"stage {name!r}: {error}") from error
        if isinstance(settings, StageConfig):
            placement = placement_for(name, settings.placement, runtime.kind)
            settings = settings.model_copy(update={"placement": placement})
        stages[name] = settings
    given = {
        "name": "composed",
        "speaker": pipeline.speaker,
        "voices": pipeline.voices.aliases,
        "runtime": runtime,
        "stages": stages,
    }
    try:
        return PipelineConfig.model_validate(given)
    except ValidationError as error:
        mistakes = explain_validation_error(error, PipelineConfig, given)
    raise ValueError(mistakes)


@dataclass(frozen=True, slots=True)
class _Ground:
    """What workers stand on.

    Attributes:
        connect: starts one.
        close: to be called when all have ended.
    """

    connect: Connect[WorkerSpec]
    close: Callable[[], object] = lambda: None


def _ground(config: PipelineConfig) -> _Ground:
    """Of processes or of a Ray cluster; only what is asked for is imported.

    Raises:
        ValueError: the cluster cannot be joined, or does not have what the stages ask for.
    """
    if config.runtime.kind != "ray":
        from stages.remote.process_connection import connect_process

        return _Ground(connect_process)
    from stages.cluster.direct_transport import check_transport
    from stages.cluster.reservation import Reservation

    placements = {name: stage.placement for name, stage in config.stages.items()}
    if config.runtime.direct_transport is not None:
        has_gpus = any(placement.reserved_gpus for placement in placements.values())
        check_transport(config.runtime.direct_transport, has_gpus=has_gpus)
    reservation = Reservation.of(find_cluster(config.runtime.address), placements)
    return _Ground(reservation.connect, reservation.close)


def _threads(config: PipelineConfig) -> dict[str, int]:
    if config.runtime.kind == "ray":
        return {name: stage.placement.actor_threads for name, stage in config.stages.items()}
    return resolve_threads(config, available_cores())


def worker_specs(
    pipeline: PipelineConfig, name: str, threads: int, *, is_traced: bool = False
) -> list[WorkerSpec]:
    """What each worker of a stage is told.

    Args:
        pipeline: of the stage.
        name: of the stage.
        threads: of each worker.
        is_traced: whether they tell what they do when.

    Raises:
        ValueError: its transform has no name that another process finds.
    """
    edges = tuple(
        StreamedEdge(consumer, inputs.chunk_size, inputs.max_pending_chunks)
        for consumer, other in pipeline.stages.items()
        for inputs in [other.inputs]
        if inputs is not None and inputs.chunk_size is not None and name in inputs.sources
    )
    num_replicas = len(pipeline.stages[name].placement.all_devices)
    specs = []
    for replica in range(num_replicas):
        config, transform = pipeline.resolved(name, replica), None
        if config.inputs is not None:
            transform = portable_transform(config.inputs.transform)
            inputs = replace(config.inputs, transform=transform)
            config = config.model_copy(update={"inputs": inputs})
        specs.append(
            WorkerSpec(
                name=name,
                config=config.model_dump_json(by_alias=True),
                kind=import_name(type(config)),
                transform=transform,
                edges=edges,
                replica=replica,
                num_replicas=num_replicas,
                threads=threads,
                is_traced=is_traced,
                log_level=logging.getLogger("omni").getEffectiveLevel(),
                tensor_transport=pipeline.runtime.direct_transport,
                is_shown=bool({"tensors", "audio"}.intersection(config.final_output)),
            )
        )
    return specs
