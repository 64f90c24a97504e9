"""Tokenizing and detokenizing equal those of the engine."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from omni import ChatPrompt, OmniRequest, TextPrompt
from tests.support.live_server import LiveServer

MESSAGES: list[Any] = [{"role": "user", "content": "Who is it?"}]


def post(client: openai.OpenAI, path: str, **body: Any) -> Any:
    root = str(client.base_url).removesuffix("v1/")
    return client.post(f"{root}{path}", body={"model": "chat"} | body, cast_to=object)


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"prompt": "Once upon é"}, TextPrompt("Once upon é")),
        ({"messages": MESSAGES}, ChatPrompt(tuple(MESSAGES))),
        (
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "Who is it?"}]}],
                "add_generation_prompt": True,
            },
            ChatPrompt(tuple(MESSAGES)),
        ),
    ],
)
def test_tokens_equal_those_of_the_engine(
    server: LiveServer, client: openai.OpenAI, body: dict[str, Any], prompt: Any
) -> None:
    (output,) = server.omni("chat").generate([OmniRequest(prompt)])
    ids = list(output.stages["writer"].prompt_token_ids)
    answer = post(client, "tokenize", return_token_strs=True, **body)
    assert answer["tokens"] == ids and answer["count"] == len(ids) == len(answer["token_strs"])
    assert answer["max_model_len"] == 1024
    text = post(client, "detokenize", tokens=ids)["prompt"]
    assert text == body["prompt"] if "prompt" in body else "Who is it?" in text


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("tokenize", {}, "prompt", "give a prompt or messages"),
        ("tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt", "one of them"),
        (
            "tokenize",
            {"messages": [{"role": "assistant", "content": "", "audio": {"id": "a"}}]},
            "messages",
            "must be text",
        ),
        ("tokenize", {"prompt": "x", "model": "nobody"}, "model", "does not exist"),
        ("detokenize", {"tokens": [5, 10**6]}, "tokens[1]", "ids are below"),
        ("detokenize", {"tokens": [-1]}, "tokens[0]", "greater than or equal to 0"),
    ],
)
def test_a_mistake_is_reported_with_its_field(
    client: openai.OpenAI, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.APIStatusError, match=message) as caught:
        post(client, path, **body)
    assert caught.value.param == param  # type: ignore[attr-defined]


def test_the_server_returns_its_version(client: openai.OpenAI) -> None:
    root = str(client.base_url).removesuffix("v1/")
    answer: Any = client.get(f"{root}version", cast_to=object)
    assert answer["version"]
