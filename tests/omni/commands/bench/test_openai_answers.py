"""Answers of speech, documents and realtime are read in whatever pieces they come."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import soundfile
from websockets.asyncio.server import ServerConnection, serve

from omni.commands.bench.http_target import (
    HttpSettings,
    HttpTarget,
    read_document,
    read_events,
    read_sound,
)
from omni.commands.bench.measured_request import MeasuredRequest, RequestFailure


def wav(seconds: float, rate: int = 16_000) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(round(seconds * rate), "int16"), rate, format="WAV")
    return file.getvalue()


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


def test_an_event_without_an_end_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("omni.commands.bench.http_target._MOST_BYTES", 1000)
    for chunk in (b"x" * 100, b"data: " + b"x" * 90 + b"\n"):
        with pytest.raises(RequestFailure, match="exceeded the 1000 byte limit") as error:
            read(read_events, *[chunk] * 20)
        assert error.value.kind == "unreadable event"


@pytest.mark.parametrize("size", [1, 7, 44, 45, 10_000])
def test_sound_is_counted_in_whatever_pieces_it_comes(size: int):
    content = wav(0.5)
    _, record = read(read_sound, *(content[at : at + size] for at in range(0, len(content), size)))
    assert record.audio_s == pytest.approx(0.5) and record.first_audio == 0.0
    with pytest.raises(RequestFailure, match="without samples"):
        read(read_sound, content[:44])


def test_fields_before_the_samples_are_passed_over():
    content = wav(0.25)
    more = content[:36] + b"LIST\x03\x00\x00\x00abc\x00" + content[36:]
    assert read(read_sound, more)[1].audio_s == pytest.approx(0.25)


@pytest.mark.parametrize("content", [b"ID3 mp3", b"RIFF....AVI ", b"RIFF....WAVEdata....xx"])
def test_what_is_no_wav_file_is_found_by_its_beginning(content: bytes):
    with pytest.raises(RequestFailure, match="it is no WAV file|its samples come before") as error:
        read(read_sound, content)
    assert error.value.kind == "unreadable sound"


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
    """Ask one that answers every ``response.create`` by these events."""
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
            target = HttpTarget(HttpSettings(url, "m", speech=speech, endpoint="realtime"))
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
def test_how_realtime_answers_fail(event: Any, kind: str, is_rejection: bool):
    with pytest.raises(RequestFailure) as error:
        realtime(event)
    assert (error.value.kind, error.value.is_rejection) == (kind, is_rejection)
