"""``/v1/responses`` by the official client."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.responses import Response
from openai.types.responses.response_stream_event import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from omni.server.serving.api_error import ApiError
from omni.server.serving.client import Client
from omni.server.serving.response_store import ResponseStore

ASKED: Any = {"model": "chat", "max_output_tokens": 12, "temperature": 0.0}
QUESTION = "How many clocks are there in the library?"
ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "strict": True,
}


TEXT: Any = {"type": "input_text", "text": "Look."}
BROKEN: Any = {"type": "input_image", "image_url": "data:image/png;base64,%"}
UNREADABLE: Any = {"properties": {"a": {"type": "x"}}}
CALL: Any = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
OUTPUT: Any = {"type": "function_call_output", "call_id": "c1", "output": "3"}
CALLED: Any = [{"role": "assistant", "content": "I add."}, CALL, {"type": "reasoning"}, OUTPUT]


class Day(BaseModel):
    """A form of text."""

    is_market: bool


def chat(client: openai.OpenAI, messages: list[Any], **more: Any) -> Any:
    asked = {"model": "chat", "max_tokens": 12, "temperature": 0.0} | more
    return client.chat.completions.create(messages=messages, **asked)


def checked(response: Response) -> Response:
    """Check a response against OpenAI's types and return it."""
    Response.model_validate(response.model_dump(), strict=False)
    return response


def test_a_response_equals_the_answer_of_a_chat(client: openai.OpenAI) -> None:
    response = checked(
        client.responses.create(input=QUESTION, instructions="You count clocks.", **ASKED)
    )
    answer = chat(
        client,
        [
            {"role": "system", "content": "You count clocks."},
            {"role": "user", "content": QUESTION},
        ],
    )
    assert response.output_text == answer.choices[0].message.content
    assert response.usage is not None
    assert response.usage.input_tokens == answer.usage.prompt_tokens
    assert response.usage.output_tokens == answer.usage.completion_tokens
    is_cut = answer.choices[0].finish_reason == "length"
    assert response.status == ("incomplete" if is_cut else "completed")
    assert (response.incomplete_details is not None) == is_cut
    assert response.instructions == "You count clocks." and response.max_output_tokens == 12


def test_items_are_messages(client: openai.OpenAI) -> None:
    items: Any = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Who?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"a": 2}'},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"type": "function_call_output", "call_id": "c2", "output": "4"},
    ]
    response = client.responses.create(input=items, tools=[ADD], **ASKED)
    called = [
        {
            "id": f"c{n}",
            "type": "function",
            "function": {"name": "add", "arguments": f'{{"a": {n}}}'},
        }
        for n in (1, 2)
    ]
    function = {key: value for key, value in ADD.items() if key != "type"}
    answer = chat(
        client,
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Who?"}]},
            {"role": "assistant", "content": None, "tool_calls": called},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
            {"role": "tool", "tool_call_id": "c2", "content": "4"},
        ],
        tools=[{"type": "function", "function": function}],
    )
    assert response.output_text == (answer.choices[0].message.content or "")
    assert response.usage and response.usage.input_tokens == answer.usage.prompt_tokens


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tools": [ADD], "tool_choice": "required", "temperature": 1.0, "max_output_tokens": 200},
        {
            "tools": [ADD],
            "tool_choice": {"type": "function", "name": "add"},
            "max_output_tokens": 100,
        },
    ],
)
def test_events_accumulate_to_the_response(client: openai.OpenAI, more: dict[str, Any]) -> None:
    asked: Any = (
        ASKED | {"input": QUESTION, "extra_body": {"stages": {"writer": {"seed": 3}}}} | more
    )
    whole = client.responses.create(**asked)
    with client.responses.create(stream=True, **asked) as stream:
        events = list(stream)
    known: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for number, event in enumerate(events):
        known.validate_python(event.model_dump())
        assert event.sequence_number == number
    first, second, *_, last = events
    assert (first.type, second.type) == ("response.created", "response.in_progress")
    assert last.type in ("response.completed", "response.incomplete")
    deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert "".join(deltas) == last.response.output_text == whole.output_text
    assert last.response.status == whole.status
    assert last.response.usage.total_tokens == whole.usage.total_tokens
    done = [each.item for each in events if each.type == "response.output_item.done"]
    assert done == last.response.output

    def without_ids(items: Any) -> list[dict[str, Any]]:
        return [item.model_dump(exclude={"id", "call_id"}) for item in items]

    assert without_ids(done) == without_ids(whole.output)
    if more:
        assert {item.type for item in done} == {"function_call"}
        for item in done:
            jsonschema.validate(json.loads(item.arguments), ADD["parameters"])


def test_a_conversation_continues_by_its_id(client: openai.OpenAI) -> None:
    required: Any = ASKED | {"tools": [ADD], "max_output_tokens": 100}
    first = client.responses.create(
        input=QUESTION, tool_choice={"type": "function", "name": "add"}, **required
    )
    (call,) = first.output
    assert call.type == "function_call"
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    by_id = client.responses.create(input=[output], previous_response_id=first.id, **required)
    items: Any = [{"role": "user", "content": QUESTION}, call.model_dump(), output]
    by_items = client.responses.create(input=items, **required)
    assert by_id.output_text == by_items.output_text
    assert by_id.usage and by_items.usage
    assert by_id.usage.input_tokens == by_items.usage.input_tokens
    assert by_id.usage.input_tokens_details.cached_tokens > 0
    assert by_id.previous_response_id == first.id
    assert client.responses.retrieve(first.id).output == first.output
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_a_response_that_is_not_stored_is_not_found(client: openai.OpenAI) -> None:
    response = client.responses.create(input=QUESTION, store=False, **ASKED)
    with pytest.raises(openai.BadRequestError, match="no response .* is kept") as caught:
        client.responses.create(input="And?", previous_response_id=response.id, **ASKED)
    assert caught.value.param == "previous_response_id"
    assert caught.value.code == "previous_response_not_found"


def test_the_client_parses_structured_output(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(
        model="chat", input=QUESTION, text_format=Day, max_output_tokens=40, temperature=0.0
    )
    assert isinstance(parsed.output_parsed, Day)


def test_the_options_of_a_request_are_returned(client: openai.OpenAI) -> None:
    schema: Any = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    form: Any = {"type": "json_schema", "name": "one", "strict": True, "schema": schema}
    response = client.responses.create(
        input=QUESTION, text={"format": form}, tools=[ADD], tool_choice="none", **ASKED
    )
    assert response.text.format.to_dict().items() >= form.items()
    assert [tool.to_dict()["strict"] for tool in response.tools] == [True]
    assert client.responses.create(input=QUESTION, top_logprobs=2, **ASKED).top_logprobs == 2


def test_sampling_fields_and_metadata_are_accepted(client: openai.OpenAI) -> None:
    body = {"model": "chat", "input": QUESTION, "metadata": {"run": "7"}, "temperature": 1.0}
    body |= {
        "seed": 5,
        "max_output_tokens": 8,
        "top_k": -1,
        "include": ["file_search_call.results"],
    }
    body |= {"repetition_penalty": 1.0, "skip_special_tokens": True, "chat_template_kwargs": {}}
    response: Any = client.post("/responses", body=body, cast_to=object)
    assert response["metadata"] == {"run": "7"}
    assert response["status"] == response["output"][-1]["status"] == "incomplete"
    chat = client.chat.completions.create(
        model="chat",
        messages=[{"role": "user", "content": QUESTION}],
        seed=5,
        max_tokens=8,
        temperature=1.0,
    )
    assert response["output"][0]["content"][0]["text"] == chat.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_equal_those_of_a_chat(client: openai.OpenAI, stream: bool) -> None:
    answer = chat(client, [{"role": "user", "content": QUESTION}], logprobs=True, top_logprobs=2)
    asked: Any = ASKED | {"input": QUESTION, "top_logprobs": 2}
    if stream:
        with client.responses.create(stream=True, **asked) as events:
            *_, last = events
        response = last.response
    else:
        response = client.responses.create(**asked)
    (part,) = checked(response).output[0].content
    expected = [each.model_dump() for each in answer.choices[0].logprobs.content]
    assert [each.model_dump() for each in part.logprobs] == expected and expected
    asked = ASKED | {"input": QUESTION, "include": ["message.output_text.logprobs"]}
    (part,) = client.responses.create(**asked).output[0].content
    assert [each.logprob for each in part.logprobs] == [each["logprob"] for each in expected]


def test_items_of_stored_responses_are_referred_to_by_id(client: openai.OpenAI) -> None:
    called = client.responses.create(
        **ASKED | {"max_output_tokens": 100}, input=QUESTION, tools=[ADD], tool_choice="required"
    )
    said = client.responses.create(input=QUESTION, **ASKED)
    items = [*said.output, *called.output]
    output = {"type": "function_call_output", "output": "3"}
    outputs: Any = [output | {"call_id": each.call_id} for each in called.output]
    references: Any = [{"type": "item_reference", "id": each.id} for each in items]
    first: Any = {"role": "user", "content": QUESTION}
    whole: Any = [each.to_dict() for each in items]
    asked: Any = ASKED | {"tools": [ADD]}
    expected = client.responses.create(input=[first, *whole, *outputs], **asked)
    response = client.responses.create(input=[first, *references, *outputs], **asked)
    assert response.output_text == expected.output_text
    assert response.usage and expected.usage
    assert response.usage.input_tokens == expected.usage.input_tokens
    wrong: Any = [{"type": "item_reference", "id": f"{said.output[0].id}7"}]
    with pytest.raises(openai.BadRequestError, match="is kept; send the item itself"):
        client.responses.create(input=wrong, **ASKED)
    with pytest.raises(openai.BadRequestError, match="is returned whole"):
        client.responses.retrieve(said.id, stream=True)


@pytest.mark.parametrize(
    ("wrong", "param", "message"),
    [
        ({"input": []}, "input", "must not be empty"),
        ({"input": [{"type": "web_search_call"}]}, "input[0]", "should be an item of type message"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing"),
        ({"tools": [{"type": "web_search", "name": "a"}]}, "tools[0].type", "should be"),
        ({"background": True}, "background", "a response is generated while its client waits"),
        ({"input": [{"type": "item_reference", "id": "msg_a_0"}]}, "input[0].id", "is kept"),
        ({"truncation": "middle"}, "truncation", "not supported"),
        ({"max_output_tokens": -1}, "max_output_tokens", "greater than or equal to 0"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}},
            "text.format",
            "Invalid type: x",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "1", "name": "add", "arguments": "["}]},
            "input[0].arguments",
            "should be a JSON object in a string",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "c7", "output": "3"}]},
            "input",
            "no call is 'c7'",
        ),
        ({"input": "x " * 4_000}, "input", "writer"),
        ({"instrctions": "x"}, "instrctions", "did you mean 'instructions'?"),
        ({"include": ["garbage"]}, "include[0]", "should match pattern"),
        ({"tools": [ADD, ADD]}, "tools[1].name", "'add' is there twice"),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "name": "b"}},
            "tool_choice.name",
            "'b' is none of the tools",
        ),
        (
            {"tools": [ADD | {"parameters": UNREADABLE}], "tool_choice": "required"},
            "tools",
            "tools: the parameters of 'add': cannot be read: Invalid type: x",
        ),
        (
            {"input": [*CALLED, {"role": "user", "content": [TEXT, BROKEN]}], "instructions": "a"},
            "input[4].content[1].image_url",
            "input[4].content[1].image_url: not valid base64",
        ),
        (
            {"input": [*CALLED[:2], OUTPUT | {"output": [BROKEN]}]},
            "input[2].output[0].image_url",
            "not valid base64",
        ),
    ],
)
def test_a_mistake_is_reported_with_its_field(
    client: openai.OpenAI, wrong: dict[str, Any], param: str, message: str
) -> None:
    for stream in (False, True):
        body = {"model": "chat", "input": QUESTION, "stream": stream} | wrong
        with pytest.raises(openai.BadRequestError, match=re.escape(message)) as caught:
            client.post("/responses", body=body, cast_to=object)
        assert caught.value.param == param


def test_the_store_is_bounded_and_keeps_clients_apart() -> None:
    store, ann, bob = ResponseStore(max_bytes=480), Client("1", "ann"), Client("2", "bob")
    for name in ("a", "b", "c"):
        store.add(ann, {"id": name}, [{"role": "user", "content": "x" * 100}])
    assert store.find(ann, "a")[0] == {"id": "a"}
    store.add(ann, {"id": "d"}, [{"content": "y" * 100}])
    for client, name in ((ann, "b"), (bob, "a"), (Client("3", None), "a")):
        with pytest.raises(ApiError):
            store.find(client, name)
    assert [store.find(ann, name)[0]["id"] for name in "ad"] == ["a", "d"]
    store.add(ann, {"id": "big"}, [{"content": "z" * 500}])
    with pytest.raises(ApiError):
        store.find(ann, "big")
    assert store._num_bytes == 0
    store.add(ann, {"id": "brief", "expires_at": time.time() - 1}, [])
    with pytest.raises(ApiError):
        store.find(ann, "brief")
