"""A server of small seeded pipelines, for all tests of a run."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.support.live_server import LiveServer
from tests.support.one_writer import one_writer


@pytest.fixture(scope="session")
def server(checkpoint_cache: object) -> Iterator[LiveServer]:
    """``two_step`` as it is shipped, and ``chat``, which is one small language model."""
    chat = one_writer("chat", sampling={"temperature": 0.0, "max_tokens": 12})
    with LiveServer(["two_step", chat]) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    """The official client of that server."""
    with server.client() as made:
        yield made
