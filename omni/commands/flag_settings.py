"""Flags that change a pipeline's settings without naming their places."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from engine.interface.sampling_params import SamplingParams
from engine.interface.settings import explain_validation_error
from omni.pipelines.pipeline_config import PipelineConfig

__all__ = ["with_sampling", "with_speaker"]


def with_sampling(
    pipeline: PipelineConfig, max_tokens: int | None, temperature: float | None
) -> PipelineConfig:
    """Change how every stage samples that does.

    Raises:
        ValueError: a value is wrong, or does not go with what a stage has, or no stage samples.
    """
    given = {"max_tokens": max_tokens, "temperature": temperature}
    changes = {field: value for field, value in given.items() if value is not None}
    if not changes:
        return pipeline
    flags = " ".join(f"--{field.replace('_', '-')} {value}" for field, value in changes.items())
    stages = dict(pipeline.stages)
    sampling = {name: stage.own_sampling for name, stage in stages.items()}
    if not any(sampling.values()):
        raise ValueError(f"{flags}: no stage of the pipeline {pipeline.name!r} samples")
    for name, own in sampling.items():
        if own is None:
            continue
        if "sampling" not in type(stages[name]).model_fields:
            kind = stages[name].kind
            raise ValueError(f"{flags}: stage {name!r}, of kind {kind!r}, has no 'sampling'")
        changed = _changed(own, changes, f"{flags}: stage {name!r}")
        stages[name] = stages[name].model_copy(update={"sampling": changed})
    return pipeline.model_copy(update={"stages": stages})


def _changed(own: SamplingParams, changes: dict[str, Any], where: str) -> SamplingParams:
    values = own.model_dump() | changes
    try:
        return SamplingParams.model_validate(values)
    except ValidationError as error:
        message = explain_validation_error(error, SamplingParams, values).replace("\n", "; ")
        raise ValueError(f"{where}: {message}") from error


def with_speaker(pipeline: PipelineConfig, speaker: str) -> PipelineConfig:
    """Change whose voice speaks.

    Raises:
        ValueError: the name is empty, or a stage whose checkpoint is here has no such voice.
    """
    if not speaker:
        raise ValueError("--speaker must not be empty")
    pipeline = pipeline.model_copy(update={"speaker": speaker})
    pipeline.check_speaker()
    return pipeline
