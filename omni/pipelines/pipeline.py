"""A checked graph of stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING

from omni.documents.suggestion import suggest
from omni.pipelines.graph_rules import check_graph, check_tensors, sources_of
from omni.pipelines.stage_graph import topological_order
from stages import Stage, Transform
from stages.stage_builder import build_stage

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
        transforms = check_graph(by_name)
        sources = sources_of(by_name)
        order = topological_order(sources)
        self.stages: Mapping[str, Stage] = MappingProxyType({name: by_name[name] for name in order})
        self.transforms: Mapping[str, Transform] = MappingProxyType(transforms)
        self.consumers: Mapping[str, tuple[str, ...]] = MappingProxyType(
            {name: tuple(other for other in order if name in sources[other]) for name in order}
        )
        self.speaker = speaker
        self._check_completions()
        check_tensors(self.stages, transforms)
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
                stage = build_stage(name, config.resolved(name))
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

    def _check_completions(self) -> None:
        for name, stage in self.stages.items():
            consumers = self.consumers[name]
            if consumers and stage.sampling is not None and stage.sampling.n > 1:
                raise ValueError(
                    f"stage {name!r} makes n={stage.sampling.n} completions, but feeds "
                    f"{', '.join(consumers)}, which takes one: n > 1 is for stages that feed none"
                )


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
