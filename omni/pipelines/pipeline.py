"""Checked graph of stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from engine import SamplingParams
from engine.interface.arguments import check_argument
from engine.interface.ownership import Ownership
from engine.interface.placed_error import PlacedError, suggest
from engine.interface.settings import explain_validation_error, place_of
from omni.pipelines.graph_rules import check_graph, check_tensors, sources_of, topological_order
from omni.pipelines.voices import RecordedVoice, Voices
from stages import Stage, Transform

if TYPE_CHECKING:
    from omni.pipelines.pipeline_config import PipelineConfig


class Pipeline:
    """A directed acyclic graph of stages, checked on creation.

    Stages name their sources themselves (``inputs``), so a pipeline is just a list of stages::

        Pipeline([writer, reader])        # reader.inputs.sources == ("writer",)

    Args:
        stages: stages in any order, of no other pipeline. This one owns them: :meth:`close` closes
            them.
        speaker: default voice of requests that name none; None for the checkpoint's default.
        voices: aliases of voices, or recorded ones; see :class:`~omni.pipelines.voices.Voices`.

    Attributes:
        stages: stages by name, in topological order.
        order: names of the stages, each after all that feed it.
        final_stages: names of the stages whose outputs the user gets.
        transforms: for every stage with inputs, the function that makes its prompt.
        consumers: for every stage, the names of those that it feeds.
        speaker: the given speaker, by the voice's own name.

    Raises:
        RuntimeError: a stage belongs to another pipeline, or is closed. After any error the owners
            of the stages are unchanged.
        ValueError: no stage, two of the same name, an error of :func:`check_graph` or
            :func:`check_tensors`, several completions in a stage that feeds another, or an unknown
            speaker or voice.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        speaker: str | None = None,
        voices: Mapping[str, str | RecordedVoice] = MappingProxyType({}),
    ) -> None:
        by_name = _by_name(stages)
        check_argument("speaker", speaker, str | None, "a str or None")
        transforms = check_graph(by_name)
        sources = sources_of(by_name)
        self.order = order = tuple(topological_order(sources))
        self.stages: Mapping[str, Stage] = MappingProxyType({name: by_name[name] for name in order})
        self.transforms: Mapping[str, Transform] = MappingProxyType(transforms)
        self.consumers: Mapping[str, tuple[str, ...]] = MappingProxyType(
            {name: tuple(other for other in order if name in sources[other]) for name in order}
        )
        self.final_stages = tuple(name for name in order if by_name[name].final_output)
        self._check_completions()
        check_tensors(self.stages, transforms)
        speakers = {name: stage.speakers for name, stage in self.stages.items()}
        speaking = {name: each for name, each in speakers.items() if each is not None}
        self.voices = Voices(self.stages, speaking, voices)
        self.speaker = self.voices.find(speaker)
        self.ownership = Ownership("this pipeline")
        self._after_stages: list[Callable[[], object]] = []
        self._checked_sampling: dict[str, SamplingParams] = {}
        with ExitStack() as claimed:
            for stage in self.stages.values():
                stage.ownership.claim(self, f"a pipeline of the stages {', '.join(order)}")
                claimed.callback(stage.ownership.release, self)
            claimed.pop_all()

    @classmethod
    def from_config(cls, config: PipelineConfig) -> Pipeline:
        """Build the stages of a config. If one fails, those already built are closed.

        Raises:
            ValueError: a stage cannot be built, or the graph is wrong.
        """
        # Imports users' transforms, so that their errors are detected before models are loaded.
        check_graph(config.stages, emitted=config.emitted())
        config.check_speaker()
        with ExitStack() as built:
            stages = []
            for name in config.topological_order():
                settings = config.resolved(name)
                try:
                    stage = settings.build_stage(name)
                except ValueError as error:
                    raise ValueError(f"stage {name!r}: {error}") from error
                built.callback(stage.close)
                stages.append(stage)
            pipeline = cls(stages, speaker=config.speaker, voices=config.voices)
            built.pop_all()
        return pipeline

    def merge_sampling(
        self, overrides: Mapping[str, SamplingParams | Mapping[str, Any]]
    ) -> dict[str, SamplingParams]:
        """Merge a request's sampling parameters into the stages' own.

        Unsupported parameters are detected here, before any earlier stage has done work.

        Args:
            overrides: by stage; an object replaces the stage's own, a mapping changes fields.

        Returns:
            ``stage -> parameters`` for the stages that the request names.

        Raises:
            PlacedError: there is no such stage, it samples nothing, its model does not support the
                parameters, or it is to make several completions but feeds another stage. A stage's
                own parameters are checked likewise. The place is the stage, and then the field, if
                one is at fault.
        """
        merged = {name: self._merge(name, override) for name, override in overrides.items()}
        for name, stage in self.stages.items():
            params = merged.get(name, stage.sampling)
            # A stage's own parameters need only one check.
            if params is None or params is self._checked_sampling.get(name):
                continue
            try:
                stage.check_sampling(params)
            except ValueError as error:
                place = error.place if isinstance(error, PlacedError) else ()
                raise PlacedError((name, *place), f"{_sampling_for(name)}: {error}") from error
            if params is stage.sampling:
                self._checked_sampling[name] = params
        return merged

    def _merge(self, name: str, override: SamplingParams | Mapping[str, Any]) -> SamplingParams:
        where = _sampling_for(name)
        if name not in self.stages:
            problem = f"{where}, which does not exist{suggest(name, self.stages)}"
            raise PlacedError((name,), problem)
        try:
            params = self.stages[name].merge_sampling(override)
        except ValidationError as error:
            mistakes = explain_validation_error(error, SamplingParams, override)
            place = place_of(error.errors(include_url=False)[0], override)
            raise PlacedError((name, *place), f"{where}: {mistakes}") from error
        except ValueError as error:
            raise PlacedError((name,), f"{where}: {error}") from error
        if params.n > 1 and self.consumers[name]:
            raise PlacedError(
                (name, "n"),
                f"{where}: n={params.n} completions, but it feeds "
                f"{', '.join(self.consumers[name])}, which takes one",
            )
        return params

    def close_after_stages(self, close: Callable[[], object]) -> None:
        """Register a callback for after the stages are closed, to close what they depend on."""
        self._after_stages.append(close)

    def close(self) -> None:
        """Close every stage, even if one of them fails to close. Idempotent."""
        if self.ownership.is_over:
            return
        self.ownership.close()
        with ExitStack() as closing:
            for close in self._after_stages:
                closing.callback(close)
            for stage in self.stages.values():
                closing.callback(stage.ownership.close)
                closing.callback(stage.close)

    def _check_completions(self) -> None:
        for name, stage in self.stages.items():
            consumers = self.consumers[name]
            if consumers and stage.sampling is not None and stage.sampling.n > 1:
                raise ValueError(
                    f"stage {name!r} makes n={stage.sampling.n} completions, but feeds "
                    f"{', '.join(consumers)}, which takes one: n > 1 is for stages that feed none"
                )


def _sampling_for(stage: str) -> str:
    """Return the name of a stage's sampling parameters in error messages."""
    return f"sampling for stage {stage!r}"


def _by_name(stages: Sequence[Stage]) -> dict[str, Stage]:
    check_argument("stages", stages, Sequence, "a list of stages")
    for stage in stages:
        check_argument("each of stages", stage, Stage, "a Stage")
    if not stages:
        raise ValueError("a pipeline needs at least one stage")
    by_name: dict[str, Stage] = {}
    for stage in stages:
        if stage.name in by_name:
            raise ValueError(f"two stages are named {stage.name!r}; names must be unique")
        by_name[stage.name] = stage
    return by_name
