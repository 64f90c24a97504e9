"""A checked graph of stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING

from omni.stage_graph import topological_order
from omni.suggestion import suggest
from stages import (
    AutoregressiveStage,
    EncoderStage,
    Stage,
    StageInputs,
    Transform,
    hidden_states_as_prompt_embeds,
    resolve_transform,
)

if TYPE_CHECKING:
    from omni.pipeline_config import PipelineConfig

__all__ = ["Pipeline"]


class Pipeline:
    """A directed acyclic graph of stages, checked when it is made.

    Stages name their sources themselves (``inputs``), so a pipeline is no more than the stages::

        Pipeline([writer, reader])        # reader.inputs.sources == ("writer",)

    Args:
        stages: in any order. The pipeline takes them over: :meth:`close` closes them.

    Attributes:
        stages: by name, in topological order.
        transforms: for every stage with inputs, the function that makes its prompt.
        consumers: for every stage the names of those that it feeds.

    Raises:
        ValueError: no stage, two of the same name, an unknown source, a cycle, a stage that
            leads nowhere, no final output, a transform that cannot be resolved, hidden states
            that do not fit the next stage, or several completions in a stage that feeds another.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        by_name = _by_name(stages)
        sources = {name: _sources(stage, by_name) for name, stage in by_name.items()}
        order = topological_order(sources)
        self.stages: Mapping[str, Stage] = MappingProxyType({name: by_name[name] for name in order})
        self.transforms: Mapping[str, Transform] = MappingProxyType(
            {
                name: _resolved(name, stage.inputs)
                for name, stage in self.stages.items()
                if stage.inputs is not None
            }
        )
        self.consumers: Mapping[str, tuple[str, ...]] = MappingProxyType(
            {name: tuple(other for other in order if name in sources[other]) for name in order}
        )
        self._check_outputs()
        self._check_hidden_states()

    @classmethod
    def from_config(cls, config: PipelineConfig) -> Pipeline:
        """Build the stages that a config describes. If one fails, those already built are closed.

        Raises:
            ValueError: a stage cannot be built, or the graph is wrong.
        """
        with ExitStack() as built:
            stages = []
            for name in config.topological_order():
                stage = _build_stage(config, name)
                built.callback(stage.close)
                stages.append(stage)
            pipeline = cls(stages)
            built.pop_all()
        return pipeline

    @property
    def order(self) -> tuple[str, ...]:
        """Names of the stages, each after all that feed it."""
        return tuple(self.stages)

    @property
    def final_stages(self) -> tuple[str, ...]:
        """Names of the stages whose outputs the user gets."""
        return tuple(name for name, stage in self.stages.items() if stage.final_output)

    def close(self) -> None:
        """Close every stage, even if one of them fails to."""
        with ExitStack() as closing:
            for stage in self.stages.values():
                closing.callback(stage.close)

    def _check_outputs(self) -> None:
        if not self.final_stages:
            raise ValueError(
                f"none of the stages {list(self.order)} has a final_output: "
                "the user would get nothing"
            )
        for name, stage in self.stages.items():
            consumers = self.consumers[name]
            if not consumers and not stage.final_output:
                raise ValueError(
                    f"stage {name!r} leads nowhere: it feeds no stage and has no final_output"
                )
            if consumers and stage.sampling is not None and stage.sampling.n > 1:
                raise ValueError(
                    f"stage {name!r} makes n={stage.sampling.n} completions, but feeds "
                    f"{', '.join(consumers)}, which takes one: n > 1 is for stages that feed none"
                )

    def _check_hidden_states(self) -> None:
        for name, transform in self.transforms.items():
            if transform is not hidden_states_as_prompt_embeds:
                continue
            for source, consumers in self.consumers.items():
                if name in consumers:
                    _check_edge(self.stages[source], self.stages[name])


def _by_name(stages: Sequence[Stage]) -> dict[str, Stage]:
    if not stages:
        raise ValueError("a pipeline needs at least one stage")
    by_name: dict[str, Stage] = {}
    for stage in stages:
        if not stage.name:
            raise ValueError("a stage's name must not be empty")
        if stage.name in by_name:
            raise ValueError(f"two stages are named {stage.name!r}; names must be unique")
        by_name[stage.name] = stage
    return by_name


def _sources(stage: Stage, by_name: Mapping[str, Stage]) -> tuple[str, ...]:
    if stage.inputs is None:
        return ()
    sources = stage.inputs.sources
    if not sources:
        raise ValueError(f"stage {stage.name!r} has inputs that name no stage")
    for source in sources:
        if source not in by_name:
            raise ValueError(
                f"stage {stage.name!r} takes its input from {source!r}, which is no stage"
                f"{suggest(source, by_name)}"
            )
        if sources.count(source) > 1:
            raise ValueError(f"stage {stage.name!r} names its source {source!r} twice")
    return sources


def _resolved(name: str, inputs: StageInputs) -> Transform:
    try:
        return resolve_transform(inputs.transform)
    except ValueError as error:
        raise ValueError(f"stage {name!r}: {error}") from error


def _check_edge(source: Stage, stage: Stage) -> None:
    """Whether ``source``'s hidden states can be ``stage``'s prompt embeddings."""
    edge = f"stage {stage.name!r} takes the hidden states of {source.name!r}"
    if source.outputs is not None and "hidden_states" not in source.outputs:
        raise ValueError(
            f"{edge}, whose outputs are {list(source.outputs)}: add 'hidden_states' to them"
        )
    widths = (source.hidden_size, stage.hidden_size)
    if None not in widths and widths[0] != widths[1]:
        raise ValueError(
            f"{edge}, which are {widths[0]} wide, but its own embeddings are {widths[1]} wide: "
            "the models must have the same hidden size, or a transform of your own between them"
        )


def _build_stage(config: PipelineConfig, name: str) -> Stage:
    stage = config.stages[name]
    inputs = None
    if stage.inputs is not None:
        inputs = StageInputs(stage.inputs.sources, stage.inputs.transform)
    try:
        engine = config.engine_config(name)
        if stage.kind == "encoder":
            return EncoderStage(
                name,
                engine,
                pooling=stage.pooling,
                outputs=stage.outputs,
                inputs=inputs,
                final_output=stage.final_output,
            )
        return AutoregressiveStage(
            name,
            engine,
            sampling=stage.sampling,
            outputs=stage.outputs,
            inputs=inputs,
            final_output=stage.final_output,
        )
    except ValueError as error:
        raise ValueError(f"stage {name!r}: {error}") from error
