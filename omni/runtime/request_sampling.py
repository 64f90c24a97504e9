"""The sampling parameters that a request brings for a pipeline's stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from engine import SamplingParams
from omni.documents.schema_error import explain_validation_error
from omni.documents.suggestion import suggest
from omni.pipelines.pipeline import Pipeline
from omni.requests.request import OmniRequest

__all__ = ["request_sampling"]


def request_sampling(pipeline: Pipeline, request: OmniRequest) -> dict[str, SamplingParams]:
    """Lay a request's parameters over the stages' own.

    What a stage could not do is found here, before the stages ahead of it have done any work.

    Returns:
        ``stage -> parameters`` for the stages that the request names.

    Raises:
        ValueError: there is no such stage, it samples nothing, its model cannot do what is asked
            for, or it is to make several completions and feeds another stage. Parameters that a
            stage has of its own are checked alike.
    """
    merged = {name: _merge(pipeline, name, override) for name, override in request.sampling.items()}
    for name, stage in pipeline.stages.items():
        params = merged.get(name, stage.sampling)
        if params is None:
            continue
        try:
            stage.check_sampling(params)
        except ValueError as error:
            raise ValueError(f"sampling for stage {name!r}: {error}") from error
    return merged


def _merge(
    pipeline: Pipeline, name: str, override: SamplingParams | Mapping[str, Any]
) -> SamplingParams:
    stage = pipeline.stages.get(name)
    if stage is None:
        raise ValueError(
            f"sampling for stage {name!r}, which does not exist{suggest(name, pipeline.stages)}"
        )
    try:
        params = stage.merge_sampling(override)
    except ValidationError as error:
        mistakes = explain_validation_error(error, SamplingParams, override)
        raise ValueError(f"sampling for stage {name!r}: {mistakes}") from error
    except ValueError as error:
        raise ValueError(f"sampling for stage {name!r}: {error}") from error
    if params.n > 1 and pipeline.consumers[name]:
        raise ValueError(
            f"sampling for stage {name!r}: n={params.n} completions, but it feeds "
            f"{', '.join(pipeline.consumers[name])}, which takes one"
        )
    return params
