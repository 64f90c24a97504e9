"""The official client: chats, tools, forms, responses, sound."""

from __future__ import annotations

import base64
import io
import json
import wave
from typing import Any

import openai
import openapi_spec_validator
import pytest
from pydantic import BaseModel, ConfigDict

pytestmark = pytest.mark.client("openai")
ADD: Any = {
    "type": "object",
    "properties": {"exact": {"type": "boolean"}},
    "required": ["exact"],
    "additionalProperties": False,
}


class Day(BaseModel):
    """A form of text."""

    model_config = ConfigDict(extra="forbid")
    is_market: bool


@pytest.fixture
def client() -> openai.OpenAI:
    return openai.OpenAI()


def test_a_sum_is_answered_by_voice_and_in_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="spoken_sums",
        messages=[{"role": "user", "content": "twelve plus thirty"}],
        modalities=["text", "audio"],
        audio={"voice": "alloy", "format": "wav"},
    )
    message = answer.choices[0].message
    assert message.content and "12 + 30" in message.content and message.audio
    with wave.open(io.BytesIO(base64.b64decode(message.audio.data))) as sound:
        assert sound.getnframes() / sound.getframerate() > 0.3


def test_what_is_said_is_heard(client: openai.OpenAI) -> None:
    said = client.audio.speech.create(
        model="spoken_sums", voice="alloy", input="8 * 4", response_format="wav"
    )
    assert said.content[:4] == b"RIFF"
    heard = client.audio.transcriptions.create(
        model="spoken_sums", file=("said.wav", said.content), response_format="text"
    )
    assert isinstance(heard, str) and heard.strip()


def test_a_spoken_answer_is_named_by_its_id(client: openai.OpenAI) -> None:
    asked: Any = {"role": "user", "content": "twelve plus thirty"}
    spoken: Any = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "opus"}}
    first = client.chat.completions.create(model="spoken_sums", messages=[asked], **spoken)
    audio = first.choices[0].message.audio
    assert audio and base64.b64decode(audio.data).startswith(b"OggS")
    said: Any = {"role": "assistant", "audio": {"id": audio.id}}
    again = client.chat.completions.create(model="spoken_sums", messages=[asked, said, asked])
    assert again.choices[0].message.content


def test_speech_is_fast_and_slow_in_every_format(client: openai.OpenAI) -> None:
    asked: Any = {"model": "spoken_sums", "voice": "alloy", "input": "8 * 4"}
    formats: Any = ("mp3", "opus", "aac", "flac", "wav", "pcm")
    for form in formats:
        slow, fast = (
            client.audio.speech.create(**asked, response_format=form, speed=speed).content
            for speed in (0.5, 2.0)
        )
        assert len(slow) > 1.5 * len(fast) > 0


def test_the_description_of_its_addresses_is_valid(client: openai.OpenAI) -> None:
    described = client.get("../openapi.json", cast_to=dict[str, Any])
    openapi_spec_validator.validate(described)
    assert "/v1/chat/completions" in described["paths"]


def test_a_stream_adds_up(client: openai.OpenAI) -> None:
    asked: Any = {"model": "chat", "messages": [{"role": "user", "content": "Hello"}]}
    whole = client.chat.completions.create(**asked)
    parts = client.chat.completions.create(stream=True, **asked)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content


def test_a_tool_is_called(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="chat",
        messages=[{"role": "user", "content": "Add."}],
        tools=[{"type": "function", "function": {"name": "add", "parameters": ADD}}],
        tool_choice={"type": "function", "function": {"name": "add"}},
    ) as stream:
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    assert choice.message.tool_calls[0].function.name == "add"


def test_a_form_is_parsed_in_chats_and_responses(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Which day?"}]
    chat = client.chat.completions.parse(model="chat", messages=messages, response_format=Day)
    assert isinstance(chat.choices[0].message.parsed, Day)
    response = client.responses.parse(model="chat", input="Which day?", text_format=Day)
    assert isinstance(response.output_parsed, Day)


def test_models_are_listed(client: openai.OpenAI) -> None:
    names = {model.id for model in client.models.list()}
    assert names == {"caller", "chat", "ears", "finder", "spoken_sums"}


def test_a_session_hears_when_speech_has_ended_and_answers(client: openai.OpenAI) -> None:
    with wave.open(io.BytesIO(client.audio.speech.create(
        model="spoken_sums", input="twelve plus thirty", voice="alloy", response_format="wav"
    ).read())) as spoken:  # fmt: skip
        rate, sound = spoken.getframerate(), spoken.readframes(10 * spoken.getframerate())
    silence = bytes(2 * rate)
    form = {"type": "audio/pcm", "rate": rate}
    with client.realtime.connect(model="spoken_sums") as session:
        session.session.update(session={"type": "realtime", "audio": {"input": {"format": form}}})
        content = silence + sound + silence
        for begin in range(0, len(content), rate // 10 * 2):
            piece = content[begin : begin + rate // 10 * 2]
            session.input_audio_buffer.append(audio=base64.b64encode(piece).decode())
        kinds, transcript = [], ""
        for event in session:
            assert event.type != "error", event
            kinds.append(event.type)
            if event.type == "response.output_audio_transcript.done":
                transcript = event.transcript
            if event.type == "response.done":
                assert event.response.status == "completed"
                break
    assert transcript and "response.output_audio.delta" in kinds
    order = ["input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped"]
    assert [kind for kind in kinds if kind in order] == order


def test_a_session_calls_a_tool(client: openai.OpenAI) -> None:
    tool = {"type": "function", "name": "add", "parameters": ADD}
    part = {"type": "input_text", "text": "How much is it?"}
    with client.realtime.connect(model="chat") as session:
        session.session.update(
            session={"type": "realtime", "tools": [tool], "tool_choice": "required"}
        )
        session.conversation.item.create(
            item={"type": "message", "role": "user", "content": [part]}
        )
        session.response.create()
        for event in session:
            assert event.type != "error", event
            if event.type == "response.function_call_arguments.done":
                assert isinstance(json.loads(event.arguments)["exact"], bool)
                break
