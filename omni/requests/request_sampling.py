"""The sampling parameters that a line of ``requests.jsonl`` gives, for one stage or for all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from engine import SamplingParams
from engine.interface.schema_error import explain_validation_error
from engine.interface.suggestion import suggest

__all__ = ["sampling_of"]


def sampling_of(
    given: Mapping[str, Any], own: Mapping[str, SamplingParams | None]
) -> dict[str, SamplingParams]:
    """Lay a line's sampling over the stages' own, field by field.

    Args:
        given: ``{stage: {field: value}}``, or ``{field: value}`` for every stage that samples, or
            both, where a stage's own word counts. A key that is a stage's name and a field's is
            the stage where its value is a mapping.
        own: every stage's own parameters; None for a stage that does not sample.

    Raises:
        ValueError: an unknown stage or field, a stage that does not sample, or a wrong value.
    """
    fields = {key: value for key, value in given.items() if _is_field(key, value, own)}
    stages = {key: value for key, value in given.items() if key not in fields}
    sampled = [stage for stage, params in own.items() if params is not None]
    if fields and not sampled:
        raise ValueError(f"sampling.{next(iter(fields))}: no stage of this pipeline samples")
    for stage, value in stages.items():
        if stage not in own:
            raise ValueError(f"sampling.{stage}: unknown stage{suggest(stage, own)}")
        if not isinstance(value, Mapping):
            shown = repr(value)[:80]
            raise ValueError(f"sampling.{stage}: should be a mapping of its fields, got {shown}")
        if own[stage] is None and value.keys() != {"truncate_prompt_tokens"}:
            raise ValueError(f"sampling.{stage}: this stage does not sample; leave it out")
    named = sampled if fields else stages
    return {stage: _merged(stage, fields, stages.get(stage, {}), own) for stage in named}


def _is_field(key: str, value: object, own: Mapping[str, object]) -> bool:
    if key in own:
        # A stage may be called "seed".
        return key in SamplingParams.model_fields and not isinstance(value, Mapping)
    return key in SamplingParams.model_fields or not isinstance(value, Mapping)


def _merged(
    stage: str,
    for_all: Mapping[str, Any],
    for_it: Mapping[str, Any],
    own: Mapping[str, SamplingParams | None],
) -> SamplingParams:
    params = own[stage] or SamplingParams(max_tokens=0)
    changed = params.model_dump(mode="json") | dict(for_all) | dict(for_it)
    try:
        return SamplingParams.model_validate_json(json.dumps(changed), strict=True)
    except ValidationError as error:
        # A mistake in what is for all stages is told without the name of one of them.
        within = ("sampling", stage) if for_it or not for_all else ("sampling",)
        message = explain_validation_error(error, SamplingParams, changed, within=within)
        raise ValueError(message.replace("\n", "; ")) from error
