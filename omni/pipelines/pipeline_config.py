"""What a pipeline's YAML file may say, and what it means when it says nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from engine.interface.config import EngineConfig, EngineSettings
from engine.interface.generator_config import GenerationParams, GeneratorConfig, GeneratorSettings
from engine.interface.sampling_params import SamplingParams
from omni.documents.document_error import PlacedError
from omni.documents.suggestion import suggest
from omni.pipelines.config_file import load_config
from omni.pipelines.model_reference import locate_model
from omni.pipelines.stage_graph import topological_order
from stages import Transform, resolve_transform, takes_chunks

__all__ = [
    "AutoregressiveStageConfig",
    "EncoderStageConfig",
    "GeneratorStageConfig",
    "InputsConfig",
    "PipelineConfig",
    "StageConfig",
]


def _check_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", value):
        raise ValueError("a name starts with a letter and has letters, digits, '_' and '-' only")
    return value


# Names become parts of file names, and of places such as stages.writer.engine.
Name = Annotated[str, AfterValidator(_check_name)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class InputsConfig(_Strict):
    """The edges into a stage.

    Attributes:
        sources: names of the stages whose outputs are needed; ``from`` in YAML, where one name
            may stand alone.
        transform: makes the stage's prompt from those outputs: a registered name, or
            ``package.module:function``.
        chunk_size: tokens of the one source after which the next chunk is handed on, while the
            source goes on; None waits until it is done.
        max_pending_chunks: chunks of one request that may wait for this stage before the source
            pauses the request.
    """

    sources: tuple[str, ...] = Field(alias="from", min_length=1)
    transform: str
    chunk_size: int | None = Field(default=None, ge=1)
    max_pending_chunks: int = Field(default=2, ge=1)

    @field_validator("sources", mode="before")
    @classmethod
    def _one_source_is_a_list_of_one(cls, value: Any) -> Any:
        return _as_tuple(value)


class _StageConfig(_Strict):
    kind: str
    model: str = Field(min_length=1)
    part: str | None = Field(default=None, min_length=1)
    inputs: InputsConfig | None = None

    @field_validator("model")
    @classmethod
    def _model_can_be_found(cls, value: str, info: ValidationInfo) -> str:
        return locate_model(value, base_dir=(info.context or {}).get("base_dir"))

    # Each kind says itself which forms it has.
    @field_validator("final_output", mode="before", check_fields=False)
    @classmethod
    def _one_form_is_a_list_of_one(cls, value: Any) -> Any:
        return _as_tuple(value)


class _TokenStageConfig(_StageConfig):
    engine: EngineSettings = EngineSettings()
    outputs: tuple[str, ...] | None = None

    def engine_config(self) -> EngineConfig:
        """Join model and engine settings, building a ``seeded:`` model if need be."""
        return EngineConfig(model=_built(self.model), part=self.part, **self.engine.model_dump())


class AutoregressiveStageConfig(_TokenStageConfig):
    """A stage that generates tokens.

    Attributes:
        kind: ``autoregressive``.
        model: folder, hub id, or ``seeded:<name>`` for a small checkpoint that is built on first
            use.
        part: which model of a checkpoint that holds several, such as ``thinker``.
        engine: how the engine runs the model.
        sampling: how tokens are chosen, unless a request says otherwise.
        inputs: the stages that feed this one; without it the stage gets the user's prompt.
        outputs: names of the per-token tensors to keep; None keeps all that the model puts out.
        final_output: what the user gets of this stage: ``text``, ``tensors`` or both.
    """

    kind: Literal["autoregressive"]
    sampling: SamplingParams = SamplingParams()
    final_output: tuple[Literal["text", "tensors"], ...] = ()


class EncoderStageConfig(_TokenStageConfig):
    """A stage that runs one forward pass over its whole input.

    Attributes:
        kind: ``encoder``.
        model: folder, hub id, or ``seeded:<name>`` for a small checkpoint that is built on first
            use.
        part: which model of a checkpoint that holds several, such as ``thinker``.
        engine: how the engine runs the model.
        pooling: how the rows become the one row ``pooled``; ``auto`` takes what the checkpoint
            was made for.
        inputs: the stages that feed this one; without it the stage gets the user's prompt.
        outputs: names of the tensors to keep; None keeps all that the model puts out.
        final_output: ``tensors`` if the user gets this stage's tensors.
    """

    kind: Literal["encoder"]
    pooling: Literal["auto", "mean", "cls", "last", "pooler"] = "auto"
    final_output: tuple[Literal["tensors"], ...] = ()


class GeneratorStageConfig(_StageConfig):
    """A stage that makes sound of codec tokens.

    Attributes:
        kind: ``generator``.
        model: folder, hub id, or ``seeded:<name>`` for a small checkpoint that is built on first
            use.
        part: which model of a checkpoint that holds several, such as ``code2wav``.
        engine: how the engine runs the model.
        generation: how sound is made.
        inputs: the stages that feed this one.
        final_output: ``audio`` if the user gets the sound.
    """

    kind: Literal["generator"]
    engine: GeneratorSettings = GeneratorSettings()
    generation: GenerationParams = GenerationParams()
    final_output: tuple[Literal["audio"], ...] = ()

    def generator_config(self) -> GeneratorConfig:
        """Join model and settings, building a ``seeded:`` model if need be."""
        return GeneratorConfig(
            model=_built(self.model),
            part=self.part,
            generation=self.generation,
            **self.engine.model_dump(),
        )


StageConfig: TypeAlias = AutoregressiveStageConfig | EncoderStageConfig | GeneratorStageConfig


class PipelineConfig(_Strict):
    """A pipeline: stages by name, each saying which stages feed it.

    Attributes:
        name: of the pipeline.
        description: what it is for, in a sentence.
        speaker: whose voice requests get that name none; None takes the checkpoint's first choice.
        stages: any acyclic graph.
    """

    name: Name
    description: str | None = None
    speaker: str | None = Field(default=None, min_length=1)
    stages: dict[Name, Annotated[StageConfig, Field(discriminator="kind")]] = Field(min_length=1)

    @classmethod
    def load(cls, config: str | Path, overrides: Mapping[str, Any] | None = None) -> PipelineConfig:
        """Read a pipeline from a YAML file.

        Args:
            config: path of a YAML file, or the name of one that is shipped, such as ``two_step``.
            overrides: values by dotted place (``"stages.writer.engine.num_blocks"``), which
                replace the file's.

        Raises:
            ConfigError: there is no such file, or something in it is wrong; the message names
                every wrong place.
        """
        return load_config(cls, config, overrides or {})

    @model_validator(mode="after")
    def _stages_make_a_pipeline(self) -> PipelineConfig:
        self._check_sources()
        self._check_order()
        self._check_every_stage_is_used()
        self._check_transforms()
        return self

    def topological_order(self) -> list[str]:
        """Name the stages so that each comes after all that feed it; else in the file's order."""
        return topological_order(self._sources())

    def _sources(self) -> dict[str, tuple[str, ...]]:
        return {
            name: stage.inputs.sources if stage.inputs else ()
            for name, stage in self.stages.items()
        }

    def _check_sources(self) -> None:
        for name, sources in self._sources().items():
            place = ("stages", name, "inputs", "from")
            for source in sources:
                if source not in self.stages:
                    message = f"unknown stage {source!r}{suggest(source, self.stages)}"
                    raise PlacedError(place, message)
            if len(set(sources)) < len(sources):
                raise PlacedError(place, f"a stage is named twice: {', '.join(sources)}")

    def _check_order(self) -> None:
        try:
            topological_order(self._sources())
        except ValueError as error:
            raise PlacedError(("stages",), f"{error}; remove one of the edges") from error

    def _check_every_stage_is_used(self) -> None:
        feeding = {source for sources in self._sources().values() for source in sources}
        if not any(stage.final_output for stage in self.stages.values()):
            raise PlacedError(
                ("stages",),
                "nothing comes out of this pipeline; give at least one stage a final_output",
            )
        for name, stage in self.stages.items():
            if name not in feeding and not stage.final_output:
                raise PlacedError(
                    ("stages", name),
                    "no stage takes its output and it has no final_output; give it one, name it "
                    "in another stage's inputs, or remove it",
                )

    def _check_transforms(self) -> None:
        for name, stage in self.stages.items():
            if stage.inputs is None:
                continue
            try:
                transform = resolve_transform(stage.inputs.transform)
            except ValueError as error:
                place = ("stages", name, "inputs", "transform")
                raise PlacedError(place, str(error)) from error
            if stage.inputs.chunk_size is not None:
                self._check_stream(name, stage.kind, stage.inputs, transform)

    def _check_stream(
        self, name: str, kind: str, inputs: InputsConfig, transform: Transform
    ) -> None:
        """Whether a stage can begin while its source goes on, as far as kinds can tell."""
        source = self.stages[inputs.sources[0]]
        problem = None
        if len(inputs.sources) > 1:
            problem = f"is for one source, got {len(inputs.sources)}"
        elif kind == "encoder":
            problem = "is not for an encoder, which reads its whole input at once"
        elif source.kind != "autoregressive":
            problem = (
                f"needs a source that generates tokens; {inputs.sources[0]!r} is of kind "
                f"{source.kind!r}"
            )
        elif not takes_chunks(transform):
            problem = (
                f"needs a transform that works chunk by chunk, which {inputs.transform!r} does not"
            )
        if problem is not None:
            raise PlacedError(
                ("stages", name, "inputs", "chunk_size"),
                f"{problem}; leave it out to wait until the source is done",
            )


def _built(model: str) -> str:
    from omni.seeded.checkpoints import resolve_model  # imports transformers: seconds

    return resolve_model(model)


def _as_tuple(value: Any) -> Any:
    """Accept ``text`` for ``[text]``, and nothing for an empty list."""
    match value:
        case None:
            return ()
        case str():
            return (value,)
        case list():
            return tuple(value)
    return value
