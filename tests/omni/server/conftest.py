"""A server of small seeded pipelines, for all tests of a run."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from omni.pipelines.pipeline_config import PipelineConfig
from tests.support.live_server import LiveServer


@pytest.fixture(scope="session")
def server(checkpoint_cache: object) -> Iterator[LiveServer]:
    """``two_step`` as it is shipped, and ``chat``, which is one small language model."""
    stage = {
        "kind": "autoregressive",
        "model": "seeded:qwen2",
        "engine": {"num_blocks": 256, "max_num_batched_tokens": 256},
        "sampling": {"temperature": 0.0, "max_tokens": 12},
        "outputs": [],
        "final_output": "text",
    }
    chat = PipelineConfig.model_validate({"name": "chat", "stages": {"writer": stage}})
    with LiveServer(["two_step", chat]) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    """The official client of that server."""
    with server.client() as made:
        yield made
