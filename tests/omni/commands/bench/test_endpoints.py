"""What is asked of addresses that are neither chats nor completions, and how it is read."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from websockets.asyncio.server import ServerConnection, serve

from omni.commands.bench.http_call import Reader, read_document, read_sound
from omni.commands.bench.http_settings import HttpSettings
from omni.commands.bench.measured_request import MeasuredRequest, RequestFailure
from omni.commands.bench.openai_call import openai_call
from omni.commands.bench.realtime_call import RealtimeCall
from omni.commands.bench.request_timer import RequestTimer
from omni.commands.bench.wav_pieces import WavPieces

HERE = Path()


def wav(seconds: float, rate: int = 16_000) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(round(seconds * rate), "int16"), rate, format="WAV")
    return file.getvalue()


@pytest.mark.parametrize("size", [1, 7, 44, 45, 10_000])
def test_sound_is_counted_in_whatever_pieces_it_comes(size: int):
    content = wav(0.5)
    pieces = WavPieces()
    seconds = [pieces.feed(content[at : at + size]) for at in range(0, len(content), size)]
    assert sum(seconds) == pytest.approx(0.5)
    assert (pieces.has_sound and seconds[0] == 0) or size > 44


def test_fields_before_the_samples_are_passed_over():
    content = wav(0.25)
    more = content[:36] + b"LIST\x03\x00\x00\x00abc\x00" + content[36:]
    assert WavPieces().feed(more) == pytest.approx(0.25)


@pytest.mark.parametrize("content", [b"ID3 mp3", b"RIFF....AVI ", b"RIFF....WAVEdata....xx"])
def test_what_is_no_wav_file_is_found_by_its_beginning(content: bytes):
    with pytest.raises(ValueError, match="it is no WAV file|it says nothing of its samples"):
        WavPieces().feed(content)


def read(reader: Reader, *chunks: bytes) -> tuple[str, MeasuredRequest]:
    async def come() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    timer = RequestTimer(0.0, lambda: 1.0)
    timer.send()

    async def all_of_it() -> str:
        return await reader(come(), timer)

    return asyncio.run(all_of_it()), timer.end()


def test_sound_is_timed_from_its_first_samples_on():
    content = wav(1.0)
    _, record = read(read_sound, content[:20], content[20:])
    assert record.audio_s == pytest.approx(1.0) and record.first_audio == 0.0
    with pytest.raises(RequestFailure, match="without samples"):
        read(read_sound, content[:44])


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


def test_speech_is_asked_for_as_a_file_that_tells_its_rate():
    call = openai_call("speech", {"prompt": "Hi", "speaker": "Ann"}, HERE, "m", None)
    body = {"model": "m", "input": "Hi", "response_format": "wav", "voice": "Ann"}
    assert (call.path, json.loads(call.content)) == ("/audio/speech", body)
    other = openai_call("speech", {"prompt": "Hi", "speaker": "Ann"}, HERE, "m", "Ben")
    assert json.loads(other.content)["voice"] == "Ben"


def test_a_recording_is_sent_as_a_form(tmp_path: Path):
    (tmp_path / 'a "b".wav').write_bytes(b"RIFF\r\n--x")
    line = {"audio": [{"file": 'a "b".wav', "language": "fr", "task": "translate"}]}
    call = openai_call("transcriptions", line, tmp_path, "m", None)
    assert call.path == "/audio/translations"
    assert b'name="language"\r\n\r\nfr\r\n' in call.content
    assert b'filename="a \\"b\\".wav"\r\n\r\nRIFF\r\n--x\r\n--' in call.content


@pytest.mark.parametrize(
    ("endpoint", "line", "told"),
    [
        ("speech", {"prompt_token_ids": [1]}, "takes lines with a text as their 'prompt' alone"),
        ("speech", {"prompt": "x", "sampling": {"n": 1}}, "takes lines with a text"),
        ("embeddings", {"promt": "x"}, "did you mean 'prompt'?"),
        ("transcriptions", {"prompt": "x"}, "takes lines with one file as their 'audio'"),
        ("transcriptions", {"audio": ["nowhere.wav"]}, "cannot be read"),
    ],
)
def test_lines_that_cannot_be_said_so_are_told(endpoint: Any, line: Any, told: str):
    with pytest.raises(ValueError, match=told.replace("?", r"\?")):
        openai_call(endpoint, line, HERE, "m", None)


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
            timer = RequestTimer(0.0, asyncio.get_running_loop().time)
            call = RealtimeCall(HttpSettings(url, speech=speech, endpoint="realtime"), "m", "Hi")
            text = await call.send(timer)
            return text, timer.end()

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
