"""Drawings and descriptions of a pipeline, and the formats in which it fits this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
import transformers
import yaml
from torch import nn

from engine.checkpoints.checkpoint import locate
from engine.checkpoints.quantized_weight import SCHEMES
from engine.interface.sampling_params import CHECKPOINT_FIELDS, SamplingParams
from engine.llm.llm_engine import outline_needs
from engine.models.model_loader import is_supported, open_checkpoint
from engine.resources.device import resolve_device
from engine.resources.memory_plan import MemoryEstimate, format_bytes, free_bytes
from omni.pipelines.pipeline_config import PipelineConfig
from omni.pipelines.runtime_config import resolve_threads, stages_by_worker
from omni.server.serving.settings import ServerLimits
from stages.stage_config import StageConfig, TokenStageConfig

_WAVE = "~"
_STREAMED = "  ~~N~~► begins while its source goes on, which hands over N tokens at a time"


def draw_graph(config: PipelineConfig) -> str:
    """Draw each stage with its inputs and its final outputs, sources first.

    ::

        prompt ──────────────────────────────────► writer => text
        writer ──hidden_states_as_prompt_embeds──► reader => text

        writer  autoregressive  models/writer
        reader  autoregressive  models/reader

    If a stage starts while its source is still running, the arrow is a wave with the chunk size:
    ``writer ~~my_transforms:codes~~4~~► speaker``.
    """
    stages = [(name, config.stages[name]) for name in config.topological_order()]
    edges = [_edge(*stage) for stage in stages]
    width = max(len(label) for _, label, _, _ in edges)
    arrows = [
        (source, f"{line * 2}{label.ljust(width, line)}{line * 2}►", target)
        for source, label, line, target in edges
    ]
    return "\n".join(
        [
            config.name + (f": {config.description}" if config.description else ""),
            "",
            *columns(arrows, " "),
            *(["", _STREAMED] if any(line == _WAVE for _, _, line, _ in edges) else ()),
            "",
            *columns([(name, stage.kind, _model(stage)) for name, stage in stages]),
        ]
    )


def describe_config(config: PipelineConfig) -> str:
    """Format the pipeline as YAML with every default; loading it gives the same pipeline."""
    dumped = config.model_dump(mode="json", by_alias=True)
    usual = dict(SamplingParams())
    own = {name: usual.pop(name) for name in CHECKPOINT_FIELDS}
    for name, stage in dumped["stages"].items():
        stage["kind"] = config.stages[name].kind_reference
        if (given := config.stages[name].own_sampling) is not None:
            stage["sampling"] = given.with_defaults(usual).model_dump(mode="json")
        stage["final_output"] = stage.pop("final_output")  # move outputs to the end
    shown = yaml.safe_dump(dumped, sort_keys=False, width=80).rstrip()
    defaults = ", ".join(f"{name} {'null' if x is None else x}" for name, x in own.items())
    return (
        f"Every setting:\n\n{shown}\n"
        "# Where sampling leaves these out, generation_config.json decides, or else they are\n"
        f"# {defaults}.\n"
        "# Its suppressed tokens, bad words and ends of sequences hold besides."
    )


def describe_memory(config: PipelineConfig) -> str:
    """Load all stages and describe what they reserve; ``ValueError`` if one cannot be built."""
    from omni.pipelines.pipeline import Pipeline

    lines = ["Resolved and reserved:"]
    with closing(Pipeline.from_config(config)) as pipeline:
        for name, stage in pipeline.stages.items():
            lines += ["", f"  {name}"]
            for key, value in stage.describe().items():
                if isinstance(value, list | tuple):
                    lines += [f"    {key}:", *(f"      {line}" for line in value)]
                else:
                    lines.append(f"    {key}: {value}")
    return "\n".join(lines)


def _edge(name: str, stage: StageConfig) -> tuple[str, str, str, str]:
    """Return a stage's sources, transform, arrow character, and its name with final outputs."""
    sources = " + ".join(stage.inputs.sources) if stage.inputs else "prompt"
    label, line = stage.inputs.transform_name if stage.inputs else "", "─"
    if stage.inputs and stage.inputs.chunk_size is not None:
        label, line = f"{label}{_WAVE * 2}{stage.inputs.chunk_size}", _WAVE
    final = f" => {', '.join(stage.final_output)}" if stage.final_output else ""
    return sources, label, line, name + final


def _model(stage: StageConfig) -> str:
    return (stage.model or "") + (f" ({stage.part})" if stage.part else "")


def columns(rows: Sequence[Sequence[str]], gap: str = "  ") -> list[str]:
    """Format rows of cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([cell.ljust(size) for cell, size in zip(row, widths, strict=True)] for row in rows)
    return [f"  {gap.join(cells)}".rstrip() for cells in padded]


_TRANSFERS = {
    "inline": "its output",
    "processes": "a handle of shared memory",
    "ray": "a reference into the object store",
}


def draw_placement(config: PipelineConfig, cores: int) -> str:
    """Draw where each stage runs, and what is sent over the edges."""
    kind = config.runtime.kind
    count = "1 core" if cores == 1 else f"{cores} cores"
    heading = f"Where the stages run ({kind}, {count}):"
    if kind == "inline":
        threads = {name: stage.placement.threads for name, stage in config.stages.items()}
        lines = _stage_lines(config, config.topological_order(), threads)
        boxes = _box("this process: all stages by turns", lines)
    else:
        line = "takes requests, and hands on handles: what stages compute goes past it"
        here = _box("this process", [line])
        boxes = here + (_cluster(config) if kind == "ray" else _processes(config, cores))
    return "\n".join([heading, "", *(f"  {line}" for line in boxes)])


def _stage_lines(
    config: PipelineConfig, names: Sequence[str], threads: Mapping[str, int | None]
) -> list[str]:
    """List the stages of one process, each with its inputs."""
    lines = []
    for name in names:
        count = threads[name]
        of = "" if count is None else f"{_counted(count, 'thread', 'threads')}, "
        lines.append(f"{name}, {of}{_device(config.stages[name])}")
        lines += [f"  {edge}" for edge in _edges(config, name)]
    return lines


def _processes(config: PipelineConfig, cores: int) -> list[str]:
    threads = resolve_threads(config.placements, cores)
    boxes = []
    for worker, names in stages_by_worker(config.placements):
        stage = config.stages[names[0]]
        if stage.placement.worker is None:
            workers = _counted(stage.placement.replicas, "process", "processes")
            of = _counted(threads[worker], "thread", "threads")
            lines = [f"{workers} of {of}, {_device(stage)}", *_edges(config, worker)]
            boxes += _box(worker, lines)
        else:
            lines = _stage_lines(config, names, threads)
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
        actors = _counted(placement.replicas, "actor", "actors")
        line = f"{actors} that reserves {', '.join(needs)}{where}, {_device(stage)}"
        if placement.replicas > 1:
            line = line.replace("reserves", "reserve")
        boxes += _box(name, [line, *_edges(config, name)])
    return _box(f"Ray cluster: {config.runtime.address or 'on this machine'}", boxes)


def _edges(config: PipelineConfig, name: str) -> list[str]:
    """Describe the inputs of a stage, and how they arrive."""
    inputs = config.stages[name].inputs
    if inputs is None:
        return ["◄── prompt"]
    transfer = _TRANSFERS[config.runtime.kind]
    if inputs.chunk_size is not None:
        (source,) = inputs.sources
        tokens = _counted(inputs.chunk_size, "token", "tokens")
        return [
            f"◄~~ {source}: {transfer}, every {tokens}; "
            f"{inputs.max_pending_chunks} of them may wait"
        ]
    return [f"◄── {source}: {transfer}, when it is done" for source in inputs.sources]


def _device(stage: StageConfig) -> str:
    placement = stage.placement
    if placement.devices is not None:
        return ", ".join(placement.devices)
    own = getattr(getattr(stage, "engine", None), "device", None)
    device = placement.device or own
    return "no device" if device is None else f"device {device}"


def _counted(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def _box(title: str, lines: Sequence[str]) -> list[str]:
    width = max(len(title) + 1, *(len(line) for line in lines))
    head = f"┌ {title} {'─' * (width - len(title))}┐"
    return [head, *(f"│ {line.ljust(width)} │" for line in lines), f"└{'─' * (width + 2)}┘"]


_MEDIA = {
    "max_audio_s": "a sound",
    "max_image_pixels": "pixels of an image",
    "max_video_s": "a video",
    "max_video_pixels": "pixels of a video's frames",
    "max_file_bytes": "a file",
}
"""Quantity that each media limit of a stage bounds."""


def _format_limit(name: str, value: float) -> str:
    """Format a limit in the unit that its name ends in."""
    if name.endswith("_bytes"):
        return format_bytes(int(value))
    return f"{value:,g} s" if name.endswith("_s") else f"{value:,}"


def describe_serving(config: PipelineConfig) -> str:
    """Describe the default limits of a server of this pipeline.

    Media are bounded by the stages that read the user's prompt.
    """
    limits = ServerLimits()
    values = dict(limits) | {
        "max_running_requests": limits.running_requests(config.stages.values())
    }
    rows = []
    for name, field in ServerLimits.model_fields.items():
        rows.append((field.title or "", _format_limit(name, values[name]), field.description or ""))
        if name == "max_body_bytes":
            most = _format_limit("_bytes", limits.max_arriving_bytes)
            rows.append(("bodies that come at once", most, "four times that; more get 429"))
    for stage, settings in config.stages.items():
        media = getattr(getattr(settings, "engine", None), "media_limits", None)
        if settings.inputs is None and media is not None:
            place = f"stages.{stage}.engine.media_limits"
            rows += [
                (what, _format_limit(name, getattr(media, name)), f"{place}.{name}")
                for name, what in _MEDIA.items()
            ]
    width = max(len(shown) for _, shown, _ in rows)
    limits_shown = columns([(what, shown.rjust(width), how) for what, shown, how in rows])
    return "\n".join(["At most, when it is served:", "", *limits_shown])


_FORMATS: Mapping[str, Mapping[str, Any]] = {
    **{dtype: {"dtype": dtype, "quantization": None} for dtype in ("float32", "bfloat16")},
    **{scheme: {"quantization": scheme} for scheme in SCHEMES},
}
_HEADS = ("stage", "format", "weights", "KV pages", "kept rows", "activations", "")


def describe_needs(config: PipelineConfig) -> str:
    """Describe the memory of each stage in each format; name stages without a local config."""
    known, devices, notes = {}, {}, []
    rows: list[tuple[str, ...]] = [_HEADS]
    for name in config.topological_order():
        stage = config.stages[name]
        placed: list[Any] = [stage.on_device(device) for device in stage.placement.all_devices]
        try:
            of = estimate_stage(placed[0])
            devices[name], known[name] = [resolve_device(x.engine.device) for x in placed], of
        except ValueError as error:
            notes.append(f"  {name} is left out: {str(error).splitlines()[0]}")
            continue
        rows += [(name, kind, *map(format_bytes, each[:4]), "") for kind, each in of.items()]
    now = {device: free_bytes(device) for each in devices.values() for device in each}
    for kind in max(known.values(), key=len, default=()):
        chosen = {name: of.get(kind) or next(iter(of.values())) for name, of in known.items()}
        held = [(device, chosen[name]) for name, each in devices.items() for device in each]
        is_short = any(size < sum(x.least for on, x in held if on == d) for d, size in now.items())
        verdict = "does not fit" if is_short else "not known" if notes else "fits"
        total = map(sum, zip(*(x[:4] for _, x in held), strict=True))
        rows.append(("together", kind, *map(format_bytes, total), verdict))
    free_now = ", ".join(f"{device} has {format_bytes(size)} free" for device, size in now.items())
    title = f"What the stages take, by their configs alone ({free_now or 'none here'}):"
    return "\n".join([title, "", *(columns(rows) if known else ()), *notes])


def estimate_stage(stage: StageConfig) -> Mapping[str, MemoryEstimate]:
    """Estimate a replica's memory by format; ``ValueError`` if its config is incomplete."""
    engine: Any = getattr(stage, "engine", None)
    if stage.model is None or not hasattr(engine, "revision"):
        raise ValueError(f"stages of kind {stage.kind!r} do not say what they take")
    trusted = getattr(engine, "trust_remote_code", False)
    model = str(locate(stage.model, engine.revision, trusted, configs_only=True))
    checkpoint = open_checkpoint(model, part=stage.part, trust_remote_code=trusted)
    if isinstance(stage, TokenStageConfig) and is_supported(checkpoint.architecture):
        given, outputs = stage.engine_config().model_copy(update={"model": model}), stage.outputs
        if outputs is None:
            outputs = tuple(stage.emitted(checkpoint.whole_config.to_dict()) or ())
        formats = _FORMATS if checkpoint.stored is None else {checkpoint.stored: {}}
        configs = {name: given.model_copy(update=each) for name, each in formats.items()}
        return {name: outline_needs(x).estimate(x, outputs) for name, x in configs.items()}
    if (network := getattr(transformers, checkpoint.architecture, None)) is None:
        raise ValueError(f"transformers knows no {checkpoint.architecture}")
    with torch.device("meta"):
        model = network(checkpoint.config).base_model
    count = model.num_parameters()
    if not isinstance(stage, TokenStageConfig):
        matrices = [each.weight for each in model.modules() if type(each) is nn.Linear]
        rest = 4 * (count - sum(matrix.numel() for matrix in matrices))
        sizes = {"float32": 4 * count}
        for kind, scheme in SCHEMES.items():
            sizes[kind] = rest + sum(scheme.nbytes(*matrix.shape) for matrix in matrices)
        return {kind: MemoryEstimate(n, 0, 0, 0, n) for kind, n in sizes.items()}
    length = engine.max_model_len or getattr(checkpoint.config, "max_position_embeddings", 0)
    num_tokens = (engine.num_blocks or 0) * engine.block_size or length * engine.max_num_seqs
    width, sizes = checkpoint.config.hidden_size * num_tokens, {"float32": 4, "bfloat16": 2}
    return {x: MemoryEstimate(n * count, 0, n * width, 0, n * count) for x, n in sizes.items()}
