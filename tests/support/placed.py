"""Pipelines of tests that are composed of stages, run where users run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from omni.pipelines.pipeline import Pipeline
from omni.pipelines.runtime_config import RuntimeConfig
from omni.runtime.placed_pipeline import place_pipeline

__all__ = ["PLACES", "everywhere", "placed"]

PLACES = ("inline", "processes", "ray")
"""Kinds of runtimes over which promises are tried."""


_Test = TypeVar("_Test", bound=Callable[..., Any])


def everywhere(test: _Test) -> _Test:
    """Have a test's orchestrators run over all of them: on Ray as well, which takes longest.

    Without it, those that use the fixture ``anywhere`` leave out Ray.
    """
    parametrized = pytest.mark.parametrize("anywhere", PLACES, indirect=True)(test)
    return pytest.mark.usefixtures("anywhere")(parametrized)


def placed(pipeline: Pipeline, where: str) -> Pipeline:
    """Let a pipeline's stages run somewhere; nothing that fails is run again.

    Args:
        pipeline: of nobody else; it is used up.
        where: one of :data:`PLACES`.
    """
    return place_pipeline(pipeline, RuntimeConfig.model_validate({"kind": where, "max_retries": 0}))
