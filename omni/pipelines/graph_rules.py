"""Rules for a graph of stages, which are built ones or settings from a YAML file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TypeAlias

from engine.interface.placed_error import PlacedError, suggest
from stages import Stage, StageConfig, StageInputs, Transform, resolve_transform
from stages.transforms.registry import (
    Requirements,
    is_custom,
    requirements_of,
)

GraphStage: TypeAlias = Stage | StageConfig
"""Settings know only the chunk support that is independent of the model; a built stage all."""


class GraphError(PlacedError):
    """A violated rule of a graph; the message names the stage, for graphs without a file.

    Attributes:
        problem: the message without the place in a YAML file.
    """

    def __init__(self, place: tuple[str, ...], problem: str) -> None:
        _, *names = place
        parts = [f"stage {names[0]!r}", *filter(None, [".".join(names[1:])])] if names else []
        super().__init__(place, ": ".join([*parts, problem]))
        self.problem = problem


def sources_of(stages: Mapping[str, GraphStage]) -> dict[str, tuple[str, ...]]:
    """Return the names of the stages that feed each stage."""
    return {
        name: stage.inputs.sources if stage.inputs is not None else ()
        for name, stage in stages.items()
    }


def topological_order(sources: Mapping[str, Sequence[str]]) -> list[str]:
    """Sort stages so that each comes after all that feed it; otherwise keep the given order.

    Raises:
        ValueError: stages feed each other in a cycle; the message names it.
    """
    depth: dict[str, int] = {}
    try:
        for stage in TopologicalSorter(sources).static_order():
            depth[stage] = 1 + max((depth[source] for source in sources[stage]), default=-1)
    except CycleError as error:
        circle = " -> ".join(error.args[1])
        raise ValueError(f"stages feed each other in a circle: {circle}") from error
    # graphlib's order within one rank is that of a set, so keep the user's order there.
    return sorted(sources, key=depth.__getitem__)


def check_graph(
    stages: Mapping[str, GraphStage],
    *,
    run_custom: bool = True,
    emitted: Mapping[str, Collection[str]] | None = None,
) -> dict[str, Transform]:
    """Check that stages form an acyclic graph with an output.

    Args:
        run_custom: if true, import the modules of users' transforms. If not, their requirements are
            not checked.
        emitted: names of the tensors that stages' models emit, if known.

    Returns:
        For every stage with inputs, the function that makes its prompt, except those not imported.

    Raises:
        GraphError: an unknown source, a cycle, an unused stage, no final output, a transform that
            cannot be resolved or takes another number of sources, or an edge with a chunk size
            that cannot be streamed.
    """
    _check_sources(stages)
    try:
        topological_order(sources_of(stages))
    except ValueError as error:
        raise GraphError(("stages",), f"{error}; remove one of the edges") from error
    _check_every_stage_is_used(stages)
    transforms = {}
    for name, stage in stages.items():
        if stage.inputs is None:
            continue
        transform = stage.inputs.transform
        if isinstance(transform, str) and is_custom(transform) and not run_custom:
            needs = None
        else:
            try:
                transforms[name] = resolve_transform(transform)
            except ValueError as error:
                place = ("stages", name, "inputs", "transform")
                raise GraphError(place, str(error)) from error
            needs = requirements_of(transforms[name])
        if stage.inputs.chunk_size is not None:
            _check_streamed_edge(name, stages, stage.inputs, needs)
        if needs is not None:
            wanted, got = needs.num_sources, len(stage.inputs.sources)
            if wanted not in (None, got):
                used = f"transform {stage.inputs.transform_name!r}"
                problem = f"{used} takes {wanted} source(s), got {got}"
                raise GraphError(("stages", name, "inputs", "from"), problem)
            _check_outputs(name, stages, stage.inputs, needs, emitted or {})
    return transforms


def check_tensors(stages: Mapping[str, Stage], transforms: Mapping[str, Transform]) -> None:
    """Check that stages' tensors fit the transforms and stages that consume them.

    Raises:
        ValueError: a tensor does not have the hidden size of the next stage.
    """
    for name, transform in transforms.items():
        needs, stage = requirements_of(transform), stages[name]
        for source in (stages[each] for each in sources_of(stages)[name]):
            edge = f"stage {name!r} takes {', '.join(needs.tensors)} of {source.name!r}"
            widths = (source.hidden_size, stage.hidden_size)
            if needs.same_width and None not in widths and widths[0] != widths[1]:
                raise ValueError(
                    f"{edge}, which are {widths[0]} wide, but its own embeddings are {widths[1]} "
                    "wide: the models must have the same hidden size, or a transform of your own "
                    "between them"
                )


def _check_sources(stages: Mapping[str, GraphStage]) -> None:
    for name, stage in stages.items():
        if stage.inputs is None:
            continue
        place = ("stages", name, "inputs", "from")
        sources = stage.inputs.sources
        if not sources:
            raise GraphError(place, "must not be empty")
        for source in sources:
            if source not in stages:
                raise GraphError(place, f"unknown stage {source!r}{suggest(source, stages)}")
            if sources.count(source) > 1:
                raise GraphError(place, f"a stage is named twice: {', '.join(sources)}")


def _check_every_stage_is_used(stages: Mapping[str, GraphStage]) -> None:
    if not any(stage.final_output for stage in stages.values()):
        problem = "nothing comes out of this pipeline; give at least one stage a final_output"
        raise GraphError(("stages",), problem)
    feeding = {source for sources in sources_of(stages).values() for source in sources}
    for name, stage in stages.items():
        if name not in feeding and not stage.final_output:
            raise GraphError(
                ("stages", name),
                "no stage takes its output and it has no final_output; give it one, name it in "
                "another stage's inputs, or remove it",
            )


def _check_outputs(
    name: str,
    stages: Mapping[str, GraphStage],
    inputs: StageInputs,
    needs: Requirements,
    emitted: Mapping[str, Collection[str]],
) -> None:
    """Check that every source provides the tensors that the transform needs."""
    for source in inputs.sources:
        outputs: Collection[str] | None = getattr(stages[source], "outputs", None)
        known = emitted.get(source)
        lacking = sorted(set(needs.tensors).difference(known or needs.tensors))
        if known is not None and lacking:
            problem = (
                f"stage {name!r} needs {', '.join(map(repr, lacking))} of {source!r} with its "
                f"transform {inputs.transform_name!r}, but the model of {source!r} emits "
                f"{', '.join(known)}"
            )
            raise GraphError(("stages", source, "model"), problem)
        missing = [
            tensor for tensor in needs.tensors if outputs is not None and tensor not in outputs
        ]
        if missing:
            hint = f"add {', '.join(map(repr, missing))} to them"
            raise GraphError(
                ("stages", source, "outputs"),
                f"{list(outputs or ())} is not what stage {name!r} needs with its transform "
                f"{inputs.transform_name!r}: {hint}, or leave outputs out",
            )


def _check_streamed_edge(
    name: str,
    stages: Mapping[str, GraphStage],
    inputs: StageInputs,
    needs: Requirements | None,
) -> None:
    """Check that the only source, the transform and the stage support chunks."""
    for field in ("chunk_size", "max_pending_chunks"):
        value = getattr(inputs, field)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problem = f"must be an integer of at least 1, got {value!r}"
            raise GraphError(("stages", name, "inputs", field), problem)
    source = inputs.sources[0]
    if len(inputs.sources) != 1:
        problem = f"is for one source, got {len(inputs.sources)}"
    elif not stages[name].takes_chunks:
        kind = _kind_of(stages[name])
        article = "an" if kind[0].lower() in "aeiou" else "a"
        problem = f"is not for {article} {kind}, which reads its whole input at once"
    elif not stages[source].gives_chunks:
        problem = (
            f"needs a source that generates tokens; {source!r} is of kind "
            f"{_kind_of(stages[source])!r}"
        )
    elif needs is not None and not needs.chunkable:
        problem = (
            f"needs a transform that works chunk by chunk, which {inputs.transform_name!r} does "
            "not; mark one that does with @omni.chunkable"
        )
    else:
        return
    place = ("stages", name, "inputs", "chunk_size")
    raise GraphError(place, f"{problem}; leave it out to wait until the source is done")


def _kind_of(stage: GraphStage) -> str:
    return stage.kind if isinstance(stage, StageConfig) else type(stage).__name__
