"""Chats with tools by the official client."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest

from omni import ChatPrompt, OmniRequest
from omni.pipelines.pipeline_config import PipelineConfig
from tests.support.live_server import LiveServer

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/name"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    # A format that llguidance does not know, as Python's Path in pydantic's schemas.
    "$defs": {"name": {"type": "string", "maxLength": 6, "format": "path"}},
}
ADD: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "get_weather", "parameters": WEATHER, "strict": True},
    },
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}},
    {"type": "function", "function": {"name": "now"}},
]
WORDS_ONLY: Any = {
    "type": "function",
    "function": {"name": "say", "parameters": {"type": "string"}},
}
SCHEMAS = {"get_weather": WEATHER, "add": ADD, "now": {"maxProperties": 0}}
ASKED: Any = {
    "model": "chat",
    "messages": [{"role": "user", "content": "How is the weather?"}],
    "max_tokens": 400,
    "temperature": 1.0,
}
SHORT: Any = ASKED | {"max_tokens": 16, "seed": 1}


def called(message: Any) -> list[tuple[str, str]]:
    for call in message.tool_calls:
        assert call.type == "function" and call.id
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return [(call.function.name, call.function.arguments) for call in message.tool_calls]


@pytest.mark.parametrize("seed", range(2))
def test_a_required_call_matches_its_schema_with_and_without_a_stream(
    client: openai.OpenAI, seed: int
) -> None:
    asked = ASKED | {"tools": TOOLS, "tool_choice": "required", "seed": seed}
    asked["parallel_tool_calls"] = False
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = called(choice.message)
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    assert called(streamed.message) == [call]


def test_required_calls_are_the_same_alone_and_in_every_batch(client: openai.OpenAI) -> None:
    def ask(seed: int) -> tuple[str, Any]:
        """Ask for calls, for JSON or for plain text, by turns, as neighbours of each other."""
        asked = ASKED | {"seed": seed, "temperature": 1.3}
        kind = seed % 3
        if kind == 0:
            answer = client.chat.completions.create(**asked, tools=TOOLS, tool_choice="required")
            assert answer.choices[0].finish_reason in ("tool_calls", "length")
            return "calls", called(answer.choices[0].message)
        form = {"response_format": {"type": "json_object"}} if kind == 1 else {}
        answer = client.chat.completions.create(**asked | {"max_tokens": 24}, **form)
        return "text", answer.choices[0].message.content

    alone = [ask(seed) for seed in range(12)]
    for order in (range(12), range(11, -1, -1), [*range(0, 12, 3), *range(1, 12, 3)]):
        with ThreadPoolExecutor(len(order)) as pool:
            assert list(pool.map(ask, order)) == [alone[seed] for seed in order]


def test_json_that_is_no_call_is_streamed(client: openai.OpenAI) -> None:
    items = {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 20, "maxItems": 20}
    form: Any = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": items}}
    events = client.chat.completions.create(**ASKED, tools=TOOLS, response_format=form, stream=True)
    assert sum(bool(event.choices[0].delta.content) for event in events) > 10


def test_a_named_tool_is_called(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "add"}}
    answer = client.chat.completions.create(**ASKED, tools=TOOLS, tool_choice=named, n=3)
    for choice in answer.choices:
        ((name, _),) = called(choice.message)
        assert name == "add"


@pytest.mark.parametrize("mode", ["required", "auto"])
def test_only_allowed_tools_are_shown_and_called(client: openai.OpenAI, mode: str) -> None:
    add = {"type": "function", "function": {"name": "add"}}
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [add]}}
    asked: Any = ASKED | {"max_tokens": 64, "seed": 1, "parallel_tool_calls": False}
    many = client.chat.completions.create(**asked, tools=TOOLS, tool_choice=allowed)
    one = client.chat.completions.create(**asked, tools=TOOLS[1:2], tool_choice=mode)
    assert many.usage.prompt_tokens == one.usage.prompt_tokens
    assert many.choices[0].message.content == one.choices[0].message.content
    if mode == "required":
        ((name, _),) = called(many.choices[0].message)
        assert name == "add"
    functions: Any = [tool["function"] | {"type": "function"} for tool in TOOLS]
    choice: Any = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function"}]}
    choice["tools"][0]["name"] = "add"
    asked = {"model": "chat", "input": "How is the weather?", "temperature": 0.0}
    asked |= {"max_output_tokens": 64, "parallel_tool_calls": False, "truncation": "auto"}
    response = client.responses.create(**asked, tools=functions, tool_choice=choice)
    same = client.responses.create(**asked, tools=functions[1:2], tool_choice=mode)
    assert response.output_text == same.output_text
    assert response.usage.input_tokens == same.usage.input_tokens


def test_an_earlier_refusal_is_text(client: openai.OpenAI) -> None:
    asked = {key: value for key, value in SHORT.items() if key != "messages"} | {"seed": 3}
    forms: list[Any] = [
        {"content": "I cannot."},
        {"content": None, "refusal": "I cannot.", "annotations": []},
        {"content": [{"type": "refusal", "refusal": "I cannot."}]},
    ]
    answers = set()
    for form in forms:
        messages = [*SHORT["messages"], {"role": "assistant", **form}, *SHORT["messages"]]
        answer = client.chat.completions.create(**asked, messages=messages)
        assert answer.usage
        answers.add((answer.choices[0].message.content, answer.usage.prompt_tokens))
    assert len(answers) == 1


def test_a_conversation_continues_after_a_call(server: LiveServer, client: openai.OpenAI) -> None:
    required: Any = ASKED | {"tools": TOOLS, "seed": 1, "parallel_tool_calls": False}
    message = client.chat.completions.create(**required, tool_choice="required").choices[0].message
    assert message.tool_calls
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."}
    messages = [*ASKED["messages"], message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(
        model="chat", messages=messages, tools=TOOLS, max_tokens=8, temperature=0.0
    )
    # The same prompt in Python.
    function = call.function  # type: ignore[union-attr]
    known = {
        "id": call.id,
        "type": "function",
        "function": {"name": function.name, "arguments": json.loads(function.arguments)},
    }
    tools = tuple(
        {**tool, "function": {k: v for k, v in tool["function"].items() if k != "strict"}}
        for tool in TOOLS
    )
    prompt = ChatPrompt(
        (
            ASKED["messages"][0],
            {"role": "assistant", "content": None, "tool_calls": [known]},
            result,
        ),
        tools=tools,
    )
    wanted = {"writer": {"max_tokens": 8, "temperature": 0.0}}
    (output,) = server.omni("chat").generate([OmniRequest(prompt, sampling=wanted)])
    assert output.error is None
    assert answer.choices[0].message.content == output.stages["writer"].text
    assert answer.usage and answer.usage.prompt_tokens == output.stages["writer"].num_prompt_tokens


def test_the_model_does_not_see_tools_that_it_must_not_call(client: openai.OpenAI) -> None:
    without = client.chat.completions.create(**SHORT)
    none = client.chat.completions.create(**SHORT, tools=TOOLS, tool_choice="none")
    auto = client.chat.completions.create(**SHORT, tools=TOOLS)
    assert without.choices[0].message == none.choices[0].message
    assert without.usage and auto.usage
    assert auto.usage.prompt_tokens > without.usage.prompt_tokens


def test_hints_are_accepted(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(**SHORT)
    hints: list[dict[str, Any]] = [
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"reasoning_effort": "low", "verbosity": "low"},
        {"extra_body": {"prediction": {"type": "content", "content": "x"}}},
    ]
    for more in hints:
        hinted = client.chat.completions.create(**SHORT, **more)
        assert plain.choices[0].message == hinted.choices[0].message


FUNCTION = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("wrong", "param", "message"),
    [
        ({"tools": [FUNCTION] * 129}, "tools", "at most 128 are taken, got 129"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools[1].function.name", "'add' is there twice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        (
            {"tools": [{"type": "function", "function": {"name": "no name"}}]},
            "tools[0].function.name",
            "should match pattern",
        ),
        ({"tool_choice": "required"}, "tool_choice", "needs tools to choose from"),
        (
            {"tools": [WORDS_ONLY], "tool_choice": "required"},
            "tools",
            "the parameters of 'say': must be of type object, got 'string'",
        ),
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "b"}}},
            "tool_choice.function.name",
            "'b' is none of the tools; they are add",
        ),
        (
            {
                "tools": [FUNCTION],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "auto",
                        "tools": [{"type": "function", "function": {"name": "b"}}],
                    },
                },
            },
            "tool_choice.allowed_tools.tools[0].function.name",
            "'b' is none of the tools; they are add",
        ),
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "custom"}},
            "tool_choice",
            "should be none, auto, required, or a mapping of the type function or allowed_tools",
        ),
        (
            {"tools": [FUNCTION], "tool_choice": "required", "guided_regex": "a"},
            "tool_choice",
            "requires a call, and guided_regex a text",
        ),
        (
            {"chat_template_kwargs": {"messages": []}},
            "messages",
            "chat_template_kwargs has 'messages', which is given elsewhere",
        ),
    ],
)
def test_wrong_tools_are_reported_with_their_field(
    client: openai.OpenAI, wrong: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(message)) as caught:
        client.chat.completions.create(**ASKED, extra_body=wrong)
    assert caught.value.param == param


def test_ten_thousand_properties_are_refused(client: openai.OpenAI) -> None:
    properties: dict[str, Any] = {f"p{number}": {} for number in range(10_000)}
    big: dict[str, Any] = {
        "name": "big",
        "parameters": {"type": "object", "properties": properties},
    }
    tools: Any = [{"type": "function", "function": big}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASKED, tools=tools, tool_choice="required")
    assert caught.value.param == "tools" and "at most 65536 are taken" in str(caught.value)
    auto = client.chat.completions.create(**SHORT, tools=tools[:1], tool_choice="none")
    assert auto.choices[0].message.content
    for number in range(1000, 10_000):
        del properties[f"p{number}"]
    with pytest.raises(openai.BadRequestError, match="'big': an object has 1000 optional prop"):
        client.chat.completions.create(**ASKED, tools=tools, tool_choice="required")


def call(arguments: str) -> dict[str, Any]:
    return {"id": "1", "function": {"name": "add", "arguments": arguments}}


@pytest.mark.parametrize(
    ("wrong", "param", "message"),
    [
        ({"role": "tool", "content": "x"}, "tool_call_id", "goes together with the role 'tool'"),
        ({"role": "user", "content": "x", "tool_call_id": "y"}, "tool_call_id", "goes together"),
        ({"role": "assistant"}, "content", "missing; it must be given"),
        (
            {"role": "user", "content": "x", "tool_calls": [call("{}")]},
            "tool_calls", "belongs to an assistant's message",
        ),
        (
            {"role": "assistant", "tool_calls": [call("[]")]},
            "tool_calls[0].function.arguments", "should be a JSON object in a string",
        ),
    ],
)  # fmt: skip
def test_wrong_messages_are_reported_with_their_field(
    client: openai.OpenAI, wrong: dict[str, Any], param: str, message: str
) -> None:
    messages: Any = [*ASKED["messages"], wrong]
    with pytest.raises(openai.BadRequestError, match=re.escape(message)) as caught:
        client.chat.completions.create(**(ASKED | {"messages": messages}))
    assert caught.value.param == f"messages[1].{param}"


@pytest.fixture(scope="module")
def speaking(seeded: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A pipeline with speech whose chat template has tools."""
    folder = tmp_path_factory.mktemp("speaking") / "omni"
    shutil.copytree(seeded("qwen3_omni"), folder)
    template = folder / "chat_template.jinja"
    template.write_text("{% if tools %}{{ tools | tojson }}{% endif %}" + template.read_text())
    stages = ("thinker", "talker", "code2wav")
    overrides = {f"stages.{name}.model": str(folder) for name in stages}
    with LiveServer([PipelineConfig.load("qwen3_omni_seeded", overrides=overrides)]) as server:
        yield server


def test_a_pipeline_with_speech_speaks_words_but_not_calls(speaking: LiveServer) -> None:
    client = speaking.client()
    asked: Any = ASKED | {"model": "qwen3_omni_seeded", "tools": TOOLS, "temperature": 0.0}
    asked |= {"modalities": ["text", "audio"], "audio": {"format": "pcm16"}}
    choices = (("required", 400, True), ("required", 8, False), ("none", 24, False))
    for choice, max_tokens, is_call in (*choices, ("auto", 24, False)):
        asked |= {"max_tokens": max_tokens, "parallel_tool_calls": False}
        is_silent = choice == "required"  # also a call that is cut
        (whole,) = client.chat.completions.create(**asked, tool_choice=choice).choices
        assert (whole.message.audio is None) is is_silent
        assert bool(whole.message.tool_calls) is is_call
        chunks = client.chat.completions.create(**asked, tool_choice=choice, stream=True)
        deltas = [each.choices[0].delta for each in chunks if each.choices]
        sounds = [sound for each in deltas if (sound := getattr(each, "audio", None))]
        assert bool([each for each in sounds if each.data]) is not is_silent
        if whole.message.audio is not None:
            written = "".join(each.transcript or "" for each in sounds)
            assert written == whole.message.audio.transcript
