"""Embeddings are the rows that ``Omni`` gives in Python."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from omni import TextPrompt
from tests.support.live_server import LiveServer


@pytest.fixture(scope="module")
def embedding(checkpoint_cache: object) -> Iterator[LiveServer]:
    with LiveServer(["encode_then_generate"]) as server:
        yield server


@pytest.fixture(scope="module")
def client(embedding: LiveServer) -> Any:
    return embedding.client()


TEXTS = ["Once upon a time", "Twice", "Once upon a hill there was a house"]


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_embeddings_are_the_encoders_pooled_rows(embedding: LiveServer, client: Any, encoding: Any):
    given: dict[str, Any] = {} if encoding is None else {"encoding_format": encoding}
    given["extra_body"] = {"priority": 1, "cache_salt": "mine"}
    answer = client.embeddings.create(model="encode_then_generate", input=TEXTS, **given)
    outputs = embedding.omni("encode_then_generate").generate([TextPrompt(text) for text in TEXTS])
    for index, (found, output) in enumerate(zip(answer.data, outputs, strict=True)):
        row = found.embedding
        if isinstance(row, str):
            row = np.frombuffer(b64decode(row), "<f4")
        expected = output.stages["encoder"].tensors["pooled"]
        assert found.index == index
        np.testing.assert_allclose(row, expected.numpy(), atol=1e-5)
    tokens = sum(output.stages["encoder"].num_prompt_tokens for output in outputs)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == tokens


def test_one_text_and_token_ids_have_embeddings_too(client: Any):
    for given in ("Once", [5, 6, 7], [[5, 6], [7]]):
        answer = client.embeddings.create(model="encode_then_generate", input=given)
        assert len(answer.data) == (2 if isinstance(given[0], list) else 1)


def test_nothing_is_left_of_all_that(embedding: LiveServer):
    embedding.check_nothing_is_left()
