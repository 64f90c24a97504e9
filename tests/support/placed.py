"""Pipelines of tests that are composed of stages, run where users run them."""

from __future__ import annotations

from omni.pipelines.pipeline import Pipeline
from omni.pipelines.runtime_config import RuntimeConfig
from omni.runtime.placed_pipeline import place_pipeline

__all__ = ["PLACES", "placed"]

PLACES = ("inline", "processes", "ray")
"""Kinds of runtimes over which promises are tried."""


def placed(pipeline: Pipeline, where: str) -> Pipeline:
    """Let a pipeline's stages run somewhere; nothing that fails is run again.

    Args:
        pipeline: of nobody else; it is used up.
        where: one of :data:`PLACES`.
    """
    return place_pipeline(pipeline, RuntimeConfig.model_validate({"kind": where, "max_retries": 0}))
