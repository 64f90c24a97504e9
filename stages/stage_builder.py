"""From the settings of a stage to the stage: what a pipeline, or a worker of one, needs for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticKnownError

from stages.stage import Stage
from stages.stage_config import StageConfig, stage_kind, stage_kinds

__all__ = ["build_stage", "parse_stage_config"]


def parse_stage_config(
    data: Any, *, from_file: bool = False, context: Mapping[str, Any] | None = None
) -> StageConfig:
    """Check the settings of one stage against its kind.

    Args:
        data: a mapping with ``kind``; a configuration is returned as it is.
        from_file: whether types are JSON's, and must be right: a number in quotes is no number.
        context: of the validation; see ``ModelReference``.

    Raises:
        ValueError: whatever is wrong, as pydantic tells it.
    """
    if isinstance(data, StageConfig):
        return data
    if not isinstance(data, dict):
        raise PydanticKnownError("dict_type")
    if "kind" not in data:
        raise PydanticKnownError("union_tag_not_found", {"discriminator": "'kind'"})
    kind = str(data["kind"])
    config = stage_kind(kind)
    if config is None:
        known = ", ".join(map(repr, stage_kinds()))
        tags = {"discriminator": "'kind'", "tag": kind, "expected_tags": known}
        raise PydanticKnownError("union_tag_invalid", tags)
    if from_file:
        # From JSON, strict validation still takes a list for a tuple.
        return config.model_validate_json(json.dumps(data), strict=True, context=context)
    return config.model_validate(data, context=context)


def build_stage(name: str, config: StageConfig) -> Stage:
    """Build a stage; its models are where its settings say.

    Args:
        name: of the stage in its pipeline.
        config: of any kind.

    Raises:
        ValueError: it cannot be built as asked.
    """
    try:
        return config.build_stage(name)
    except ValueError as error:
        raise ValueError(f"stage {name!r}: {error}") from error
