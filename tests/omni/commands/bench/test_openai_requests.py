"""Lines of ``requests.jsonl`` in OpenAI's shapes, and errors for keys that have none."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from websockets.asyncio.server import ServerConnection, serve

from omni.commands.bench.flags import BenchFlags
from omni.commands.bench.http_target import (
    HttpTarget,
    OpenAICall,
    openai_call,
    read_document,
    read_events,
    read_sound,
)
from omni.commands.bench.load import MeasuredRequest, RequestFailure
from tests.support.tables import rows

HERE = Path()
SAME = ("model", "stream", "stream_options")


def call(endpoint: Any, line: dict[str, Any], folder: Path = HERE, **settings: Any) -> OpenAICall:
    return openai_call(line, folder, BenchFlags(endpoint=endpoint, **settings), "m")


def said(line: dict[str, Any], folder: Path = HERE) -> tuple[str, dict[str, Any]]:
    """Path and body, without the fields of all requests."""
    found = call("chat", line, folder)
    return found.path, {key: value for key, value in found.body["json"].items() if key not in SAME}


def test_text_ids_and_messages():
    assert said({"prompt": "Once"}) == ("/completions", {"prompt": "Once"})
    assert said({"prompt_token_ids": [1, 2]}) == ("/completions", {"prompt": [1, 2]})
    messages = [{"role": "system", "content": "Be"}, {"role": "user", "content": "x", "name": "n"}]
    for key in ("prompt", "messages"):
        assert said({key: messages}) == ("/chat/completions", {"messages": messages})


def test_sampling_priority_salt_and_speaker():
    line = {
        "request_id": "mine",
        "messages": [{"role": "user", "content": "x"}],
        "sampling": {"max_tokens": 3, "talker": {"seed": 1}},
        "priority": 2,
        "cache_salt": "s",
        "speaker": "Ethan",
    }
    fields = call("chat", line, speech=True).body["json"]
    assert fields == {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "modalities": ["text", "audio"],
        "max_tokens": 3,
        "stages": {"talker": {"seed": 1}},
        "priority": 2,
        "cache_salt": "s",
        "audio": {"voice": "Ethan", "format": "pcm16"},
    }


def test_files_become_part_of_the_messages_in_their_order(tmp_path: Path):
    for name in ("a.png", "b.png", "c.flac", "d.mp4"):
        (tmp_path / name).write_bytes(name.encode())
    parts = [
        {"type": "image"},
        {"type": "text", "text": "and"},
        {"type": "audio"},
        {"type": "image"},
        {"type": "image_url", "image_url": "a.png"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}},
        {"type": "input_audio", "input_audio": {"data": "eA==", "format": "mp3"}},
        {"type": "video"},
        {"type": "video_url", "video_url": {"url": "http://x/y.mp4"}},
    ]
    _, fields = said(
        {
            "messages": [{"role": "user", "content": parts}],
            "images": ["a.png", "b.png"],
            "audio": ["c.flac"],
            "videos": ["d.mp4"],
        },
        tmp_path,
    )

    def coded(name: str) -> str:
        return b64encode(name.encode()).decode()

    def image(name: str) -> dict[str, Any]:
        url = f"data:image/png;base64,{coded(name)}"
        return {"type": "image_url", "image_url": {"url": url}}

    assert fields["messages"][0]["content"] == [
        image("a.png"),
        {"type": "text", "text": "and"},
        {"type": "input_audio", "input_audio": {"data": coded("c.flac"), "format": "flac"}},
        image("b.png"),
        image("a.png"),
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}},
        {"type": "input_audio", "input_audio": {"data": "eA==", "format": "mp3"}},
        {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{coded('d.mp4')}"}},
        {"type": "video_url", "video_url": {"url": "http://x/y.mp4"}},
    ]


def test_a_line_of_openais_batch_files_is_sent_unchanged():
    body = {"messages": [{"role": "user", "content": "x"}], "n": 1}
    line = {
        "custom_id": "1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {**body, "model": "other"},
    }
    assert said(line) == ("/chat/completions", body)


@pytest.mark.parametrize(
    ("endpoint", "line", "expected"),
    rows("""
chat | {} | exactly one of prompt
chat | {"promt": "x"} | did you mean 'prompt'
chat | {"encoder_prompt": "x"} | encoder_prompt: OpenAI's API has no form
chat | {"prompt_embeds": "x.safetensors"} | prompt_embeds: OpenAI's API has no form
chat | {"audio": ["x.wav"]} | write messages
chat | {"prompt": "x", "images": ["x.png"]} | write messages
chat | {"messages": [{"role": "user", "content": [{"type": "image"}]}]} | \
more parts of type 'image' than files
chat | {"messages": [{"role": "user", "content": "x"}], "audio": ["x.wav"]} | \
more files than parts of type 'audio'
chat | {"messages": [{"role": "user", "content": [{"type": "audio"}]}], "audio": ["nowhere.wav"]} \
| nowhere.wav' does not exist, or is no file
chat | {"url": "/v1/embeddings", "body": {}} | url: must be one of /v1/chat/completions
chat | {"url": "/v1/completions", "body": 3} | body: must be an object, got 3
speech | {"prompt_token_ids": [1]} | takes lines with a text as their 'prompt' alone
speech | {"prompt": "x", "sampling": {"n": 1}} | takes lines with a text
embeddings | {"promt": "x"} | did you mean 'prompt'?
transcriptions | {"prompt": "x"} | takes lines with one file as their 'audio'
transcriptions | {"audio": ["nowhere.wav"]} | does not exist
"""),
)
def test_a_line_without_openais_form_is_refused(
    endpoint: str, line: str, expected: str, tmp_path: Path
):
    with pytest.raises(ValueError) as error:
        call(endpoint, json.loads(line), tmp_path)
    assert expected in str(error.value)


def test_completions_are_not_spoken():
    with pytest.raises(ValueError, match="--speech takes lines with messages"):
        call("chat", {"prompt": "x"}, speech=True)


def test_speech_is_requested_as_samples():
    line = {"prompt": "Hi", "speaker": "Ann"}
    body = {"model": "m", "input": "Hi", "response_format": "pcm", "voice": "Ann"}
    speech = call("speech", line)
    assert (speech.path, speech.body["json"]) == ("/audio/speech", body)
    assert call("speech", line, voice="Ben").body["json"]["voice"] == "Ben"


def test_a_recording_is_sent_as_a_form(tmp_path: Path):
    (tmp_path / 'a "b".wav').write_bytes(b"RIFF\r\n--x")
    line = {"audio": [{"file": 'a "b".wav', "language": "fr", "task": "translate"}]}
    translation = call("transcriptions", line, tmp_path)
    assert translation.path == "/audio/translations"
    content = httpx2.Request("POST", "http://x", **translation.body).read()
    assert b'name="language"\r\n\r\nfr\r\n' in content
    assert b'filename="a %22b%22.wav"' in content and b"\r\n\r\nRIFF\r\n--x\r\n--" in content


def read(reader: Any, *chunks: bytes) -> tuple[str, MeasuredRequest]:
    async def come() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    record = MeasuredRequest(0.0, lambda: 1.0)
    record.send()
    response = httpx2.Response(
        200,
        headers={"content-type": "text/event-stream"},
        content=come(),
        request=httpx2.Request("POST", "http://x"),
    )

    async def all_of_it() -> str:
        return await reader(response, record)

    text = asyncio.run(all_of_it())
    record.end()
    return text, record


def test_an_endless_event_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("omni.commands.bench.http_target._MAX_BYTES", 1000)
    for chunk in (b"x" * 100, b"data: " + b"x" * 90 + b"\n"):
        with pytest.raises(RequestFailure, match="exceeded the 1000 byte limit") as error:
            read(read_events, *[chunk] * 20)
        assert error.value.kind == "unreadable event"


@pytest.mark.parametrize("size", [1, 7, 44, 45, 10_000])
def test_sound_is_counted_however_it_is_split(size: int):
    content = bytes(24_000)
    _, record = read(read_sound, *(content[at : at + size] for at in range(0, len(content), size)))
    assert record.audio_s == pytest.approx(0.5) and record.first_audio == 0.0
    with pytest.raises(RequestFailure, match="no samples"):
        read(read_sound, b"")


def test_documents_are_embeddings_or_transcriptions():
    row = {"data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": 7}}
    _, record = read(read_document, json.dumps(row).encode())
    assert record.prompt_tokens == 7 and record.num_tokens == 0
    text, record = read(read_document, b'{"text": "Hel', b'lo", "usage": {"seconds": 1.5}}')
    assert text == "Hello" and record.prompt_tokens is None and not record.text_times


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"data": []}', b"<html>"])
def test_other_documents_are_failures(content: bytes):
    with pytest.raises(RequestFailure) as error:
        read(read_document, content)
    assert error.value.kind == "unreadable answer"


def realtime(*events: Any, speech: bool = False) -> tuple[str, MeasuredRequest, list[Any]]:
    """Send a request to a server that answers ``response.create`` by these events."""
    said: list[Any] = []

    async def talk(connection: ServerConnection) -> None:
        async for message in connection:
            said.append(json.loads(message))
            if said[-1]["type"] == "response.create":
                for event in events:
                    await connection.send(json.dumps(event))
                return

    async def ask() -> tuple[str, MeasuredRequest]:
        async with serve(talk, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            target = HttpTarget(BenchFlags(url=url, model="m", speech=speech, endpoint="realtime"))
            record = MeasuredRequest(0.0, asyncio.get_running_loop().time)
            text = await target.prepare({"prompt": "Hi"}, Path())(record)
            record.end()
            return text, record

    return *asyncio.run(ask()), said


USAGE = {"input_tokens": 9, "output_tokens": 2, "input_token_details": {"cached_tokens": 4}}
DONE = {"type": "response.done", "response": {"status": "completed", "usage": USAGE}}


def test_a_realtime_answer_is_read_to_its_end():
    text, record, said = realtime(
        {"type": "session.created"},
        {"type": "response.output_audio_transcript.delta", "delta": "Hel"},
        {"type": "response.output_audio.delta", "delta": "AAAAAA==", "rate": 2},
        {"type": "response.output_audio_transcript.delta", "delta": "lo"},
        DONE,
        speech=True,
    )
    assert text == "Hello" and record.audio_s == 1.0 and len(record.text_times) == 2
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (9, 4, 2)
    assert said[0]["session"]["output_modalities"] == ["audio"]
    assert said[1]["item"]["content"] == [{"type": "input_text", "text": "Hi"}]


@pytest.mark.parametrize(
    ("event", "kind", "is_rejection"),
    [
        ({"type": "error", "error": {"message": "no", "code": "queue_full"}}, "error event", True),
        ({"type": "error", "error": {"message": "no"}}, "error event", False),
        ({"type": "response.output_audio.delta", "delta": "?"}, "unreadable event", False),
        ({"no type": 1}, "unreadable event", False),
        ({"type": "response.done", "response": {"status": "failed"}}, "not completed", False),
        ({"type": "session.created"}, "cut off", False),
    ],
)
def test_a_realtime_answer_that_fails_has_its_kind(event: Any, kind: str, is_rejection: bool):
    with pytest.raises(RequestFailure) as error:
        realtime(event)
    assert (error.value.kind, error.value.is_rejection) == (kind, is_rejection)
