"""Structured output by the fields of OpenAI and of vLLM."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.support.live_server import LiveServer
from tests.support.tables import rows

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "rivers": {"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 3},
    },
    "required": ["city", "rivers"],
    "additionalProperties": False,
}
AS_OPENAI = {
    "type": "json_schema",
    "json_schema": {"name": "city", "strict": True, "schema": SCHEMA},
}
ASKED: Any = {
    "model": "chat",
    "messages": [{"role": "user", "content": "What is the capital?"}],
    "max_tokens": 120,
    "temperature": 1.0,
    "seed": 4,
}


class City(BaseModel):
    """A typical schema, but bounded: a random model may write forever."""

    name: str = Field(max_length=8)
    is_capital: bool


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "form",
    [
        {"response_format": AS_OPENAI},
        {"extra_body": {"structured_outputs": {"json": SCHEMA}}},
        {"extra_body": {"guided_json": json.dumps(SCHEMA)}},
        {"extra_body": {"structured_output": {"json_schema": SCHEMA}}},
    ],
)
def test_a_chat_answers_in_json_of_a_schema(
    client: openai.OpenAI, form: dict[str, Any], stream: bool
) -> None:
    answer: Any = client.chat.completions.create(stream=stream, **ASKED, **form)
    if stream:
        text = "".join(each.choices[0].delta.content or "" for each in answer)
    else:
        assert answer.choices[0].finish_reason == "stop"
        text = answer.choices[0].message.content
    jsonschema.validate(json.loads(text), SCHEMA)


def test_the_client_parses_a_pydantic_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(**ASKED, response_format=City)
    assert isinstance(answer.choices[0].message.parsed, City)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_regex": "[0-9]{2}:[0-9]{2}"}, "[0-9]{2}:[0-9]{2}"),
        ({"guided_grammar": 'start: "a" "b"'}, "ab"),
        ({"guided_grammar": 'root ::= "yes" | "no"'}, "yes|no"),  # llama.cpp's form
        ({"structured_outputs": {"choice": ["é", "è"]}}, "é|è"),
        ({"response_format": {"type": "text"}}, ".*"),
    ],
)
def test_chats_and_completions_accept_the_fields_of_vllm(
    client: openai.OpenAI, form: dict[str, Any], pattern: str
) -> None:
    chat = client.chat.completions.create(**ASKED, extra_body=form)
    assert re.fullmatch(pattern, chat.choices[0].message.content or "", re.DOTALL)
    completion = client.completions.create(
        model="chat", prompt="The capital", max_tokens=40, seed=1, extra_body=form
    )
    assert re.fullmatch(pattern, completion.choices[0].text, re.DOTALL)


@pytest.mark.parametrize(
    ("form", "param", "message"),
    rows("""
{"response_format": {"type": "json_schema"}} | response_format.json_schema | \
missing; it must be given
{"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}} | \
response_format | response_format.json_schema: cannot be read: Invalid type: x
{"guided_regex": "a("} | guided_regex | unclosed group
{"guided_regex": "a", "guided_choice": ["b"]} | guided_choice | \
given beside guided_regex; give one of them
{"guided_json": {"$ref": "#"}} | guided_json | no text can be held to it
{"guided_regex": "[^\\\\s\\\\S]"} | guided_regex | no text can be held to it
{"guided_regex": "a{1000000000}"} | guided_regex | too many expressions
{"guided_grammar": "start: start"} | guided_grammar | no text can be held to it
{"guided_grammar": "start: a{1000000}\\na: \\"x\\"{1000000}"} | guided_grammar | Too many items
{"structured_outputs": {}} | structured_outputs | give one of json_schema
{"guided_regex": "a", "min_tokens": 3} | min_tokens | min_tokens: does not go with
{"guided_json": {"type": "integer", "multipleOf": 99999989}} | guided_json | multiple 99999989
{"guided_json": {"items": {"anyOf": [{"multipleOf": 99.991}, {"multipleOf": 7}]}}} | guided_json | \
multiple 699937
"""),
)
def test_a_wrong_form_is_reported_with_its_field(
    client: openai.OpenAI, form: str, param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(message)) as caught:
        client.chat.completions.create(**ASKED, extra_body=json.loads(form))
    assert caught.value.param == (param or None)


def test_a_regular_expression_that_grows_with_its_text_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="too many expressions") as caught:
        client.chat.completions.create(**ASKED, extra_body={"guided_regex": "(a|b)?" * 4000})
    assert caught.value.param == "guided_regex"


@pytest.mark.parametrize(
    ("number", "message"),
    [(10_000, "at most 65536"), (1_000, "an object has 1000 optional properties")],
)
def test_a_huge_schema_is_refused(server: LiveServer, number: int, message: str) -> None:
    properties = {f"property{each}": {"type": "string"} for each in range(number)}
    schema = {"anyOf": [{"type": "object", "properties": properties}]}
    with server.client() as client, pytest.raises(openai.BadRequestError, match=message) as caught:
        client.chat.completions.create(**ASKED, extra_body={"guided_json": schema})
    assert caught.value.param == "guided_json"
