"""Embeddings equal the rows of ``Omni`` in Python."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import torch

from omni import OmniRequest, TextPrompt
from tests.support.live_server import LiveServer


@pytest.fixture(scope="module")
def embedding(checkpoint_cache: object) -> Iterator[LiveServer]:
    with LiveServer(["encode_then_generate"]) as server:
        yield server
        server.check_nothing_is_left()


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


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_rows_are_shortened_like_those_of_sentence_transformers(client: Any, encoding: Any):
    asked = {"model": "encode_then_generate", "input": TEXTS, "encoding_format": encoding}
    whole, short = (
        [
            np.frombuffer(b64decode(each.embedding), "<f4")
            if encoding == "base64"
            else np.array(each.embedding, np.float32)
            for each in client.embeddings.create(**asked, **more).data
        ]
        for more in ({}, {"dimensions": 5})
    )
    for row, cut in zip(whole, short, strict=True):
        expected = torch.nn.functional.normalize(torch.from_numpy(row[:5].copy()), dim=0)
        np.testing.assert_allclose(cut, expected.numpy(), atol=1e-6)
    for wrong in (0, len(whole[0]) + 1):
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(**asked, dimensions=wrong)


def test_one_text_and_token_ids_have_embeddings(client: Any):
    for given in ("Once", [5, 6, 7], [[5, 6], [7]]):
        hints = {"request_id": "a", "add_special_tokens": True, "embed_dtype": "float32"}
        answer = client.embeddings.create(
            model="encode_then_generate", input=given, extra_body=hints
        )
        assert len(answer.data) == (2 if isinstance(given[0], list) else 1)


def test_an_input_that_is_too_long_is_refused_or_truncated(embedding: LiveServer, client: Any):
    text = "Once upon a time there was a house. " * 400
    create = client.embeddings.create
    with pytest.raises(openai.BadRequestError, match="max_model_len") as error:
        create(model="encode_then_generate", input=text)
    assert error.value.param == "input"
    longest = {"extra_body": {"truncate_prompt_tokens": -1}}
    answer = create(model="encode_then_generate", input=[text, "Once"], **longest)
    model = client.models.retrieve("encode_then_generate").model_dump()
    (short,) = create(model="encode_then_generate", input="Once").data
    assert answer.data[1].embedding == short.embedding
    assert answer.usage.prompt_tokens > model["max_model_len"]
    few = {"extra_body": {"truncate_prompt_tokens": 9}}
    answer = create(model="encode_then_generate", input=text, **few)
    assert answer.usage.prompt_tokens == 9
    request = OmniRequest(text, sampling={"encoder": {"truncate_prompt_tokens": 9}})
    (output,) = embedding.omni("encode_then_generate").generate([request])
    expected = output.stages["encoder"].tensors["pooled"].numpy()
    np.testing.assert_allclose(answer.data[0].embedding, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("num_tokens", "message"),
    [(10**6, "but max_model_len is"), (0, "0 would leave nothing"), (-2, "greater than or equal")],
)
def test_an_invalid_truncation_is_reported_with_its_field(
    client: Any, num_tokens: int, message: str
):
    with pytest.raises(openai.BadRequestError, match=message) as error:
        client.embeddings.create(
            model="encode_then_generate",
            input="Once",
            extra_body={"truncate_prompt_tokens": num_tokens},
        )
    assert error.value.param == "truncate_prompt_tokens"
