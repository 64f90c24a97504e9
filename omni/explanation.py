"""What a pipeline is, for people to read."""

from __future__ import annotations

from collections.abc import Iterable

import yaml

from omni.pipeline_config import PipelineConfig, StageConfig

__all__ = ["describe_config", "describe_memory", "draw_graph"]


def draw_graph(config: PipelineConfig) -> str:
    """Draw each stage with what feeds it and what the user gets of it, sources first.

    ::

        prompt ──────────────────────────────────► writer  autoregressive  seeded:qwen2  => text
        writer ──hidden_states_as_prompt_embeds──► reader  autoregressive  seeded:llama  => text
    """
    rows = [_edge(name, config.stages[name]) for name in config.topological_order()]
    sources, transforms, names, kinds, models, finals = zip(*rows, strict=True)
    arrows = [name + "─" * (_width(transforms) - len(name)) for name in transforms]
    lines = zip(
        _aligned(sources), arrows, _aligned(names), _aligned(kinds), _aligned(models), finals,
        strict=True,
    )  # fmt: skip
    heading = config.name + (f": {config.description}" if config.description else "")
    return "\n".join(
        [
            heading,
            "",
            *(
                f"  {source} ──{arrow}──► {name}  {kind}  {model}  {final}".rstrip()
                for source, arrow, name, kind, model, final in lines
            ),
        ]
    )


def describe_config(config: PipelineConfig) -> str:
    """Write the pipeline as YAML with every default; it means the same when read again."""
    dumped = config.model_dump(mode="json", by_alias=True)
    return "Every setting:\n\n" + yaml.safe_dump(dumped, sort_keys=False, width=100).rstrip()


def describe_memory(config: PipelineConfig) -> str:
    """Load every stage and tell what it resolved and reserved.

    Raises:
        ValueError: a stage cannot be built.
    """
    from omni.pipeline import Pipeline

    pipeline = Pipeline.from_config(config)
    try:
        lines = ["Resolved and reserved:"]
        for name, stage in pipeline.stages.items():
            lines += ["", f"  {name}"]
            for key, value in stage.describe().items():
                if isinstance(value, list | tuple):
                    lines += [f"    {key}:", *(f"      {line}" for line in value)]
                else:
                    lines.append(f"    {key}: {value}")
    finally:
        pipeline.close()
    return "\n".join(lines)


def _edge(name: str, stage: StageConfig) -> tuple[str, str, str, str, str, str]:
    sources = " + ".join(stage.inputs.sources) if stage.inputs else "prompt"
    transform = stage.inputs.transform if stage.inputs else ""
    final = f"=> {', '.join(stage.final_output)}" if stage.final_output else ""
    return sources, transform, name, stage.kind, stage.model, final


def _width(column: Iterable[str]) -> int:
    return max(len(cell) for cell in column)


def _aligned(column: tuple[str, ...]) -> list[str]:
    return [cell.ljust(_width(column)) for cell in column]
