"""Where a pipeline's stages run, drawn for people."""

from __future__ import annotations

from collections.abc import Sequence

from omni.pipelines.pipeline_config import PipelineConfig
from omni.pipelines.runtime_config import resolve_threads, stages_by_worker
from stages import StageConfig

__all__ = ["draw_placement"]

_HANDED_ON = {
    "inline": "its output",
    "processes": "a handle of shared memory",
    "ray": "a reference into the object store",
}


def draw_placement(config: PipelineConfig, cores: int) -> str:
    """Draw what runs where, and what goes over the edges.

    ::

        Where the stages run (processes, 2 cores):

          ┌ this process ────────────────────┐
          │ takes requests, hands handles on │
          └──────────────────────────────────┘
          ┌ writer ────────────────────┐
          │ 1 process of 1 thread, cpu │
          │ ◄── prompt                 │
          └────────────────────────────┘

    Args:
        config: the pipeline.
        cores: of this machine.
    """
    kind = config.runtime.kind
    count = "1 core" if cores == 1 else f"{cores} cores"
    heading = f"Where the stages run ({kind}, {count}):"
    if kind == "inline":
        boxes = _box("this process: all stages by turns", _inline_lines(config))
    else:
        told = "takes requests, and hands on handles: what stages compute goes past it"
        here = _box("this process", [told])
        boxes = here + (_cluster(config) if kind == "ray" else _processes(config, cores))
    return "\n".join([heading, "", *(f"  {line}" for line in boxes)])


def _inline_lines(config: PipelineConfig) -> list[str]:
    lines = []
    for name in config.topological_order():
        stage = config.stages[name]
        count = stage.placement.threads
        of = "" if count is None else f"{_many(count, 'thread', 'threads')}, "
        lines += [f"{name}, {of}{_device(stage)}", *(f"  {edge}" for edge in _edges(config, name))]
    return lines


def _processes(config: PipelineConfig, cores: int) -> list[str]:
    threads = resolve_threads(config, cores)
    boxes = []
    for worker, names in stages_by_worker(config):
        stage = config.stages[names[0]]
        if stage.placement.worker is None:
            workers = _many(stage.placement.replicas, "process", "processes")
            of = _many(threads[worker], "thread", "threads")
            lines = [f"{workers} of {of}, {_device(stage)}", *_edges(config, worker)]
            boxes += _box(worker, lines)
        else:
            lines = []
            for name in names:
                of = _many(threads[name], "thread", "threads")
                lines.append(f"{name}, {of}, {_device(config.stages[name])}")
                lines += [f"  {edge}" for edge in _edges(config, name)]
            boxes += _box(f"{worker}: one process, its stages by turns", lines)
    return boxes


def _cluster(config: PipelineConfig) -> list[str]:
    boxes = []
    for name in config.topological_order():
        stage = config.stages[name]
        placement = stage.placement
        needs = [f"{placement.reserved_cpus:g} CPU", f"{placement.reserved_gpus:g} GPU"]
        needs += [f"{amount:g} {resource}" for resource, amount in placement.resources.items()]
        where = "" if placement.node is None else f", on node {placement.node}"
        actors = _many(placement.replicas, "actor", "actors")
        line = f"{actors} that reserves {', '.join(needs)}{where}, {_device(stage)}"
        if placement.replicas > 1:
            line = line.replace("reserves", "reserve")
        boxes += _box(name, [line, *_edges(config, name)])
    return _box(f"Ray cluster: {config.runtime.address or 'on this machine'}", boxes)


def _edges(config: PipelineConfig, name: str) -> list[str]:
    """What comes into a stage, and in which form."""
    inputs = config.stages[name].inputs
    if inputs is None:
        return ["◄── prompt"]
    handed_on = _HANDED_ON[config.runtime.kind]
    if inputs.chunk_size is not None:
        (source,) = inputs.sources
        tokens = _many(inputs.chunk_size, "token", "tokens")
        return [
            f"◄~~ {source}: {handed_on}, every {tokens}; "
            f"{inputs.max_pending_chunks} of them may wait"
        ]
    return [f"◄── {source}: {handed_on}, when it is done" for source in inputs.sources]


def _device(stage: StageConfig) -> str:
    placement = stage.placement
    if placement.devices is not None:
        return ", ".join(placement.devices)
    own = getattr(getattr(stage, "engine", None), "device", None)
    device = placement.device or own
    return "no device" if device is None else f"device {device}"


def _many(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def _box(title: str, lines: Sequence[str]) -> list[str]:
    width = max(len(title) + 1, *(len(line) for line in lines))
    head = f"┌ {title} {'─' * (width - len(title))}┐"
    return [head, *(f"│ {line.ljust(width)} │" for line in lines), f"└{'─' * (width + 2)}┘"]
