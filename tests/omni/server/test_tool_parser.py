"""Calls of tools are found in any form, however the text comes in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni.server.openai.tools import ToolCallParser

NAMES = ("add", "get_weather")
ADD = ("add", {"a": 1, "b": [2, "é"]})
WEATHER = ("get_weather", {"city": "Ulm"})
ADD_JSON = '{"name": "add", "arguments": {"a": 1, "b": [2, "é"]}}'
WEATHER_JSON = '{"name": "get_weather", "parameters": {"city": "Ulm"}}'

# A text, the form that it is in, the words and the calls in it.
TEXTS: list[tuple[str, str, str, list[Any]]] = [
    (f"<tool_call>\n{ADD_JSON}\n</tool_call>", "hermes", "", [ADD]),
    (
        f"Let me see.\n<tool_call>{ADD_JSON}</tool_call>\n"
        f"<tool_call>\n{WEATHER_JSON}\n</tool_call>\n",
        "hermes", "Let me see.", [ADD, WEATHER],
    ),
    (f"\n\n<tool_call>{ADD_JSON}", "hermes", "", [ADD]),
    ('<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', "hermes", "", [("add", {})]),
    ('<tool_call>{"name": "add", "arguments": {"a": "\\"</tool_call>"}}</tool_call> ok', "hermes",
     "ok", [("add", {"a": '"</tool_call>'})]),
    (f'<tool_call>a "b</tool_call>\n<tool_call>{ADD_JSON}</tool_call>', "hermes",
     '<tool_call>a "b</tool_call>', [ADD]),
    ("<tool_call>{no</tool_call> 1 < 2\n", "hermes", "<tool_call>{no</tool_call> 1 < 2\n", []),
    ("a <tool_call", "hermes", "a <tool_call", []),
    (WEATHER_JSON, "llama3_json", "", [WEATHER]),
    (f"<|python_tag|>{WEATHER_JSON}; {ADD_JSON}", "llama3_json", "", [WEATHER, ADD]),
    ('{"name": "Ann", "age": 3}', "llama3_json", '{"name": "Ann", "age": 3}', []),
    ('{"a": ', "llama3_json", '{"a": ', []),
    (f"[TOOL_CALLS] [{ADD_JSON}, {WEATHER_JSON}]", "mistral", "", [ADD, WEATHER]),
    (f" [{ADD_JSON}]", "mistral", "", [ADD]),
    ('get_weather{"city": "Ulm"}add{"a": 1, "b": [2, "é"]}', "mistral", "", [WEATHER, ADD]),
    ("[1, 2, 3]", "mistral", "[1, 2, 3]", []),
    ("add, then get", "mistral", "add, then get", []),
    ('[add(a=1, b=[2, "é"]), get_weather(city="Ulm")]', "pythonic", "", [ADD, WEATHER]),
    ("[add(1)]", "pythonic", "[add(1)]", []),
    ("[open(path='/etc/passwd')]", "pythonic", "[open(path='/etc/passwd')]", []),
    ("[" * 300, "pythonic", "[" * 300, []),
    ("[add(a=" + "-" * 9000 + "1)]", "pythonic", "[add(a=" + "-" * 9000 + "1)]", []),
    (f"[TOOL_CALLS]add{json.dumps(ADD[1])}[TOOL_CALLS]get_weather[ARGS]{json.dumps(WEATHER[1])}",
     "mistral", "", [ADD, WEATHER]),
    ('add{"a": NaN}', "mistral", 'add{"a": NaN}', []),
    ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "hermes",
     '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', []),
    ("", "hermes", "", []),
    ("Nothing to call here.", "hermes", "Nothing to call here.", []),
]  # fmt: skip


def parsed(pieces: list[str], form: str, **more: Any) -> tuple[str, list[Any]]:
    parser = ToolCallParser(NAMES, form, **({"is_required": False, "max_calls": None} | more))
    words, calls = "", []
    for index, piece in enumerate(pieces):
        new, found = parser.feed(piece, is_last=index == len(pieces) - 1)
        words += new
        calls += found
    assert [call.index for call in calls] == list(range(len(calls))) and parser.num_calls == len(
        calls
    )
    assert len({call.id for call in calls}) == len(calls)
    return words, [(call.function.name, json.loads(call.function.arguments)) for call in calls]


@pytest.mark.parametrize("as_auto", [False, True])
@pytest.mark.parametrize(("text", "form", "words", "calls"), TEXTS)
@given(data=st.data())
def test_words_and_calls_are_separated_however_the_text_is_split(
    text: str, form: str, words: str, calls: list[Any], as_auto: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(pieces, "auto" if as_auto else form) == (words, calls)


@given(
    text=st.text(st.sampled_from('<tool_ca>{}[]"ad:,() \n'), max_size=40), cut=st.integers(0, 40)
)
def test_no_text_without_calls_is_lost(text: str, cut: int) -> None:
    words, calls = parsed([text[:cut], text[cut:]], "auto")
    if not calls:
        assert words == text
    assert parsed([text], "auto") == (words, calls)


def test_other_formats_are_words() -> None:
    for text, form, _, calls in TEXTS:
        if form == "hermes" and calls:
            assert parsed([text], "pythonic") == (text, [])
        if form == "pythonic" and calls:
            assert parsed([text], "hermes") == (text, [])


@pytest.mark.parametrize(
    ("begin", "is_call"),
    [("[1", False), ('{"city', False), ('{"name": "Ann"', False), ("[sum(", False), ("addi", False),
     ("[", True), ('{"na', True), ('{ "name" :"add"', True), ("[add(", True), ("add", True),
     ('[{"name": "get_w', True), ("<|py", True)],
)  # fmt: skip
def test_a_text_is_held_back_only_while_it_may_be_a_call(begin: str, is_call: bool) -> None:
    parser = ToolCallParser(NAMES, "auto", is_required=False, max_calls=None)
    assert parser.feed(begin, is_last=False) == ("" if is_call else begin, [])


@pytest.mark.parametrize("form", ["auto", "hermes", "llama3_json", "mistral", "pythonic"])
def test_words_are_returned_at_once(form: str) -> None:
    parser = ToolCallParser(NAMES, form, is_required=False, max_calls=None)
    assert parser.feed("Hel", is_last=False) == ("Hel", [])


def test_words_before_a_tag_are_returned_at_once() -> None:
    parser = ToolCallParser(NAMES, "auto", is_required=False, max_calls=None)
    assert parser.feed("Hel", is_last=False) == ("Hel", [])
    assert parser.feed("lo <too", is_last=False) == ("lo", [])
    assert parser.feed("ls>", is_last=False) == (" <tools>", [])


def test_complete_calls_of_a_truncated_list_are_returned() -> None:
    text = f"[{ADD_JSON}, {WEATHER_JSON}]"
    first, second = text.index("}}") + 2, len(text) - 1
    for end in range(len(text) + 1):
        parser = ToolCallParser(NAMES, "auto", is_required=True, max_calls=None)
        words, calls = parser.feed(text[:end], is_last=True)
        assert len(calls) == (end >= first) + (end >= second)
        assert words == ("" if calls else text[:end].lstrip()), "nothing is lost"


def test_calls_above_the_maximum_are_dropped() -> None:
    text = f"<tool_call>{ADD_JSON}</tool_call><tool_call>{WEATHER_JSON}</tool_call>"
    assert parsed([text], "auto", max_calls=1) == ("", [ADD])
    assert parsed([f"[{ADD_JSON}, {WEATHER_JSON}]"], "mistral", max_calls=1) == ("", [ADD])
