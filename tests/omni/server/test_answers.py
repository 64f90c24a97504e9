"""Events that are written in part beforehand are those that are written whole."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni.server.openai.answers import (
    Answer,
    AssistantMessage,
    ChatAudio,
    Choice,
    TextEvent,
    as_event,
)
from tests.support.examples import examples


def chunk(text: str, model: str = "m", *, speaks: bool = True) -> Answer:
    delta = AssistantMessage(content=text)
    if speaks:
        delta.audio = ChatAudio(id="audio-1", transcript=text)
    choice = Choice(index=0, delta=delta)
    return Answer(
        id="chatcmpl-1", object="chat.completion.chunk", created=1, model=model, choices=[choice]
    )


@settings(max_examples=examples(50))
@given(text=st.text(), model=st.text(), speaks=st.booleans())
def test_an_event_of_a_text_is_as_if_it_were_written_whole(text: str, model: str, speaks: bool):
    event = TextEvent(lambda given: chunk(given, model, speaks=speaks)).of(text)
    assert event == as_event(chunk(text, model, speaks=speaks))
    delta = json.loads(event.removeprefix(b"data: "))["choices"][0]["delta"]
    assert delta["content"] == text and event.count(b"\n") == 2


@pytest.mark.parametrize(
    "text", ['"', "\\", '","finish_reason":"stop"', "data: x\n\n", "\u2028é😀"]
)
def test_no_text_breaks_out_of_its_event(text: str):
    events = TextEvent(chunk)
    assert [events.of(each) for each in (text, "a", text)] == [
        as_event(chunk(each)) for each in (text, "a", text)
    ]
