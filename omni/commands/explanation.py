"""What a pipeline is, for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import yaml

from engine.interface.sampling_params import CHECKPOINT_FIELDS, SamplingParams
from omni.pipelines.pipeline_config import PipelineConfig
from stages import StageConfig

__all__ = ["describe_config", "describe_memory", "draw_graph"]

_WAVE = "~"
_STREAMED = "  ~~N~~► begins while its source goes on, which hands over N tokens at a time"


def draw_graph(config: PipelineConfig) -> str:
    """Draw each stage with what feeds it and what the user gets of it, sources first.

    ::

        prompt ──────────────────────────────────► writer => text
        writer ──hidden_states_as_prompt_embeds──► reader => text

        writer  autoregressive  models/writer
        reader  autoregressive  models/reader

    Where a stage begins while its source goes on, the arrow is a wave with the chunks' size:
    ``writer ~~my_transforms:codes~~4~~► speaker``.
    """
    stages = [(name, config.stages[name]) for name in config.topological_order()]
    sources, labels, lines, targets = zip(*(_edge(*stage) for stage in stages), strict=True)
    arrows = [
        f"{line * 2}{label.ljust(_width(labels), line)}{line * 2}►"
        for line, label in zip(lines, labels, strict=True)
    ]
    names = _aligned([name for name, _ in stages])
    kinds = _aligned([stage.kind for _, stage in stages])
    rows = [
        config.name + (f": {config.description}" if config.description else ""),
        "",
        *(
            f"  {source} {arrow} {target}"
            for source, arrow, target in zip(_aligned(sources), arrows, targets, strict=True)
        ),
        *(["", _STREAMED] if _WAVE in lines else ()),
        "",
        *(
            f"  {name}  {kind}  {_model(stage)}".rstrip()
            for name, kind, (_, stage) in zip(names, kinds, stages, strict=True)
        ),
    ]
    return "\n".join(rows)


def describe_config(config: PipelineConfig) -> str:
    """Write the pipeline as YAML with every default; it means the same when read again."""
    dumped = config.model_dump(mode="json", by_alias=True)
    usual = dict(SamplingParams())
    own = {name: usual.pop(name) for name in CHECKPOINT_FIELDS}
    for name, stage in dumped["stages"].items():
        stage["kind"] = config.stages[name].kind_reference
        if (given := config.stages[name].own_sampling) is not None:
            stage["sampling"] = given.with_defaults(usual).model_dump(mode="json")
        stage["final_output"] = stage.pop("final_output")  # what comes out stands last
    shown = yaml.safe_dump(dumped, sort_keys=False, width=80).rstrip()
    told = ", ".join(f"{name} {'null' if x is None else x}" for name, x in own.items())
    return (
        f"Every setting:\n\n{shown}\n"
        "# Where sampling leaves these out, generation_config.json decides, or else they are\n"
        f"# {told}. Its suppressed tokens, bad words and ends of sequences hold besides."
    )


def describe_memory(config: PipelineConfig) -> str:
    """Load every stage and tell what it resolved and reserved.

    Raises:
        ValueError: a stage cannot be built.
    """
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
    """What feeds a stage, by which transform, the sign of its arrow, and the stage itself."""
    sources = " + ".join(stage.inputs.sources) if stage.inputs else "prompt"
    label, line = stage.inputs.transform_name if stage.inputs else "", "─"
    if stage.inputs and stage.inputs.chunk_size is not None:
        label, line = f"{label}{_WAVE * 2}{stage.inputs.chunk_size}", _WAVE
    final = f" => {', '.join(stage.final_output)}" if stage.final_output else ""
    return sources, label, line, name + final


def _model(stage: StageConfig) -> str:
    return (stage.model or "") + (f" ({stage.part})" if stage.part else "")


def _width(column: Sequence[str]) -> int:
    return max(len(cell) for cell in column)


def _aligned(column: Sequence[str]) -> list[str]:
    return [cell.ljust(_width(column)) for cell in column]
