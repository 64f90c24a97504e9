"""Events are JSON on one line, whatever the text in them is."""

from __future__ import annotations

import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from omni.server.openai.answers import Answer, AssistantMessage, ChatAudio, Choice, as_event
from tests.support.examples import examples


@settings(max_examples=examples(50))
@given(text=st.text())
@example('"')
@example('","finish_reason":"stop"')
@example("data: x\n\n")
@example("\u2028é😀")
def test_no_text_breaks_out_of_its_event(text: str):
    delta = AssistantMessage(content=text, audio=ChatAudio(id="audio-1", transcript=text))
    event = as_event(
        Answer(id="1", object="o", created=1, model="m", choices=[Choice(index=0, delta=delta)])
    )
    (choice,) = json.loads(event.removeprefix(b"data: "))["choices"]
    assert choice["delta"]["content"] == choice["delta"]["audio"]["transcript"] == text
    assert choice["finish_reason"] is None and event.count(b"\n") == 2
