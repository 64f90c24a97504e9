"""A checked graph of stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING

from omni.documents.suggestion import suggest
from omni.pipelines.stage_graph import topological_order
from stages import (
    AutoregressiveStage,
    EncoderStage,
    GeneratorStage,
    Stage,
    StageInputs,
    Transform,
    hidden_states_as_prompt_embeds,
    resolve_transform,
    takes_chunks,
    thinker_to_talker,
)
from stages.transforms.qwen2_5_omni import THINKER_TENSORS

if TYPE_CHECKING:
    from omni.pipelines.pipeline_config import PipelineConfig

__all__ = ["Pipeline"]


class Pipeline:
    """A directed acyclic graph of stages, checked when it is made.

    Stages name their sources themselves (``inputs``), so a pipeline is no more than the stages::

        Pipeline([writer, reader])        # reader.inputs.sources == ("writer",)

    Args:
        stages: in any order. The pipeline takes them over: :meth:`close` closes them.
        speaker: whose voice answers requests that name none; None leaves it to the checkpoint.

    Attributes:
        stages: by name, in topological order.
        transforms: for every stage with inputs, the function that makes its prompt.
        consumers: for every stage the names of those that it feeds.
        speaker: as given.

    Raises:
        ValueError: no stage, two of the same name, an unknown source, a cycle, a stage that
            leads nowhere, no final output, a transform that cannot be resolved, tensors that are
            not handed on or do not fit the next stage, several completions in a stage that feeds
            another, an edge with a chunk size that cannot be streamed, or an unknown speaker.
    """

    def __init__(self, stages: Sequence[Stage], *, speaker: str | None = None) -> None:
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
        self.speaker = speaker
        self._check_outputs()
        self._check_tensors()
        self._check_streamed_edges()
        self.check_speaker(speaker)

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
            pipeline = cls(stages, speaker=config.speaker)
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

    def check_speaker(self, speaker: str | None) -> None:
        """Check that every stage that speaks can speak with this voice.

        Raises:
            ValueError: one cannot, or none speaks at all.
        """
        if speaker is None:
            return
        speaking = {
            name: stage.speakers
            for name, stage in self.stages.items()
            if stage.speakers is not None
        }
        if not speaking:
            raise ValueError(f"speaker {speaker!r}: none of the stages {list(self.order)} speaks")
        for name, speakers in speaking.items():
            if speaker not in speakers:
                raise ValueError(
                    f"speaker {speaker!r}: stage {name!r} has no such voice"
                    f"{suggest(speaker, speakers)}"
                )

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

    def _check_tensors(self) -> None:
        for name, transform in self.transforms.items():
            for source, consumers in self.consumers.items():
                if name not in consumers:
                    continue
                if transform is hidden_states_as_prompt_embeds:
                    _check_edge(self.stages[source], self.stages[name])
                elif transform is thinker_to_talker:
                    _check_outputs_of_thinker(self.stages[source], self.stages[name])

    def _check_streamed_edges(self) -> None:
        for name, transform in self.transforms.items():
            stage = self.stages[name]
            if stage.inputs is not None and stage.inputs.chunk_size is not None:
                sources = [self.stages[source] for source in stage.inputs.sources]
                _check_streamed_edge(sources, stage, stage.inputs, transform)


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


def _check_outputs_of_thinker(source: Stage, stage: Stage) -> None:
    """Whether ``source`` hands on all that ``stage`` speaks from."""
    missing = [] if source.outputs is None else sorted({*THINKER_TENSORS} - {*source.outputs})
    if missing:
        raise ValueError(
            f"stage {stage.name!r} speaks what {source.name!r} hands on, whose outputs lack "
            f"{', '.join(map(repr, missing))}: they must have {', '.join(THINKER_TENSORS)}"
        )


def _check_streamed_edge(
    sources: Sequence[Stage], stage: Stage, inputs: StageInputs, transform: Transform
) -> None:
    """Whether the one source's chunks can go through the transform into ``stage``."""
    edge = f"stage {stage.name!r}: inputs.chunk_size"
    for field, least in (("chunk_size", 1), ("max_pending_chunks", 1)):
        value = getattr(inputs, field)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(
                f"stage {stage.name!r}: inputs.{field} must be an integer of at least {least}, "
                f"got {value!r}"
            )
    if len(sources) != 1:
        raise ValueError(
            f"{edge} streams one source, but it takes its input from "
            f"{', '.join(repr(source.name) for source in sources)}: leave chunk_size out"
        )
    if not sources[0].gives_chunks:
        raise ValueError(
            f"{edge} streams stage {sources[0].name!r}, which hands on its outputs whole: only "
            "decoder-only models do so token by token; leave chunk_size out"
        )
    if not stage.takes_chunks:
        raise ValueError(f"{edge}: it takes its requests whole, not in chunks: leave it out")
    if not takes_chunks(transform):
        name = inputs.transform if isinstance(inputs.transform, str) else transform.__qualname__
        raise ValueError(
            f"{edge}: its transform {name!r} works on whole outputs; use one that is marked as "
            "chunkable, or leave chunk_size out"
        )


def _build_stage(config: PipelineConfig, name: str) -> Stage:
    stage = config.stages[name]
    inputs = None
    if stage.inputs is not None:
        inputs = StageInputs(
            stage.inputs.sources,
            stage.inputs.transform,
            chunk_size=stage.inputs.chunk_size,
            max_pending_chunks=stage.inputs.max_pending_chunks,
        )
    try:
        if stage.kind == "generator":
            return GeneratorStage(
                name, stage.generator_config(), inputs=inputs, final_output=stage.final_output
            )
        engine = stage.engine_config()
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
