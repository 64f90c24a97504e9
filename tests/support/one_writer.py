"""A pipeline of one small language model, for tests that run and serve it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni.pipelines.pipeline_config import PipelineConfig


def one_writer(
    name: str, *, runtime: Mapping[str, Any] | None = None, **settings: Any
) -> PipelineConfig:
    """Build a stage ``writer`` with the given settings; by default it outputs only text."""
    usual = {
        "kind": "autoregressive",
        "model": "seeded:qwen2",
        "engine": {"num_blocks": 256, "max_num_batched_tokens": 256},
        "outputs": [],
        "final_output": "text",
    }
    stages = {"writer": usual | settings}
    return PipelineConfig.model_validate({"name": name, "runtime": runtime or {}, "stages": stages})
