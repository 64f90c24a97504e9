"""What a pipeline's YAML file may say, and what it means when it says nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    SerializeAsAny,
    ValidationInfo,
    model_validator,
)

from omni.documents.document_error import PlacedError
from omni.pipelines.config_file import load_config
from omni.pipelines.graph_rules import GraphError, check_graph, sources_of
from omni.pipelines.model_reference import locate_model
from omni.pipelines.stage_graph import topological_order
from omni.seeded.checkpoints import resolve_model
from stages import StageConfig
from stages.stage_builder import parse_stage_config

__all__ = ["PipelineConfig"]


def _check_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", value):
        raise ValueError("a name starts with a letter and has letters, digits, '_' and '-' only")
    return value


# Names become parts of file names, and of places such as stages.writer.engine.
Name = Annotated[str, AfterValidator(_check_name)]


def _of_its_kind(value: Any, info: ValidationInfo) -> StageConfig:
    base_dir = (info.context or {}).get("base_dir")
    return parse_stage_config(
        value,
        from_file=info.mode == "json",
        context={"locate_model": partial(locate_model, base_dir=base_dir)},
    )


class PipelineConfig(BaseModel):
    """A pipeline: stages by name, each saying which stages feed it.

    Attributes:
        name: of the pipeline.
        description: what it is for, in a sentence.
        speaker: whose voice requests get that name none; None takes the checkpoint's first choice.
        stages: any acyclic graph.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    description: str | None = None
    speaker: str | None = Field(default=None, min_length=1)
    stages: dict[Name, Annotated[SerializeAsAny[StageConfig], PlainValidator(_of_its_kind)]] = (
        Field(min_length=1)
    )

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
        try:
            check_graph(self.stages)
        except GraphError as error:
            raise PlacedError(error.place, error.at_place) from error
        return self

    def topological_order(self) -> list[str]:
        """Name the stages so that each comes after all that feed it; else in the file's order."""
        return topological_order(sources_of(self.stages))

    def resolved(self, name: str) -> StageConfig:
        """The settings of a stage with every model where it is, building ``seeded:`` ones."""
        stage = self.stages[name]
        return parse_stage_config(
            stage.model_dump(by_alias=True), context={"locate_model": resolve_model}
        )
