"""Malicious requests are refused cheaply and do not affect others."""

from __future__ import annotations

import gzip
import io
import json
import logging
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from email.message import Message
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from tests.support.http_call import call, connection
from tests.support.live_server import LiveServer

TRICKS = [
    "../../etc/passwd",
    "/etc/passwd",
    "Ethan/../Chelsie",
    "%2e%2e%2fEthan",
    "Ethan\0",
    "Ethan\r\nX-Evil: 1",
    "",
]


@pytest.fixture(scope="module")
def server(checkpoint_cache: object) -> Iterator[LiveServer]:
    with LiveServer(["omni_speech"]) as server:
        yield server


def post(
    server: LiveServer, path: str, body: bytes, headers: Mapping[str, str] | None = None
) -> tuple[int, Message, Any]:
    status, answered, reported = call(server.url + path, body, headers)
    return status, answered, json.loads(reported)


def chat(*parts: Any, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": list(parts) or "Hello."}]
    short = {"thinker": {"max_tokens": 2}, "talker": {"max_tokens": 2}}
    return json.dumps(
        {"model": "omni_speech", "messages": messages, "stages": short, **fields}
    ).encode()


def picture_of_nothing() -> dict[str, Any]:
    """A PNG of a few kilobytes that decodes to 200 MB."""
    file = io.BytesIO()
    Image.new("1", (8192, 8192)).save(file, "PNG")
    assert len(file.getvalue()) < 100_000
    url = "data:image/png;base64," + b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def sound_of_nothing() -> dict[str, Any]:
    """A FLAC of less than a megabyte that decodes to 21 minutes of sound."""
    file = io.BytesIO()
    soundfile.write(file, np.zeros(21 * 60 * 8000, np.int16), 8000, format="FLAC")
    assert len(file.getvalue()) < 1_000_000
    data = b64encode(file.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "flac"}}


@pytest.mark.parametrize(
    ("part", "reported"),
    [
        (picture_of_nothing(), "8192 x 8192 pixels, and 33554432 are the most"),
        (sound_of_nothing(), r"1.?260.* s"),
    ],
    ids=["picture", "sound"],
)
def test_media_that_decompress_to_far_more_are_refused(
    server: LiveServer, part: dict[str, Any], reported: str
) -> None:
    status, _, answer = post(server, "/v1/chat/completions", chat(part))
    assert status == 400
    assert re.search(reported, answer["error"]["message"]), answer


def test_a_compressed_body_is_not_decompressed(server: LiveServer) -> None:
    packed = gzip.compress(b" " * 200_000_000, 1)
    status, _, answer = post(server, "/v1/chat/completions", packed, {"Content-Encoding": "gzip"})
    assert status in (400, 415), answer


@pytest.mark.parametrize("voice", TRICKS)
def test_a_voice_is_a_name_and_not_a_path(server: LiveServer, voice: str) -> None:
    audio = {"voice": voice, "format": "wav"}
    body = chat(modalities=["text", "audio"], audio=audio)
    speech = json.dumps({"model": "omni_speech", "input": "Hello.", "voice": voice}).encode()
    for path, sent, param in (
        ("/v1/chat/completions", body, "audio.voice"),
        ("/v1/audio/speech", speech, "voice"),
    ):
        status, headers, answer = post(server, path, sent)
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert "x-evil" not in headers


@pytest.mark.parametrize(
    "head",
    [
        b"X-Request-Id: a\nX-Evil: 1\r\n",
        b"X-Request-Id: a\r\n X-Evil: 1\r\n",
        b"X-Request-Id: a\rX-Evil: 1\r\n",
        b"traceparent: 00-a\nX-Evil: 1\r\n",
    ],
)
def test_no_header_of_a_client_appears_in_an_answer_or_a_log(
    server: LiveServer, caplog: pytest.LogCaptureFixture, head: bytes
) -> None:
    with caplog.at_level(logging.DEBUG, "omni"), connection(server.url) as client:
        # In one piece: a server that refuses the first of two pieces closes the connection with
        # the second unread, and its answer may be lost.
        start = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
        client.sendall(start + head + b"Connection: close\r\n\r\n")
        answer = b""
        while piece := client.recv(4096):
            answer += piece
    assert answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 400 "))
    assert b"evil" not in answer.lower()
    assert not any("evil" in each.getMessage().lower() for each in caplog.records)


def test_a_request_id_with_line_breaks_injects_nothing(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    name = "a\r\nX-Evil: 1\r\n\r\nINFO forged"
    line = {"prompt": "Hello.", "request_id": name, "sampling": {"thinker": {"max_tokens": 2}}}
    with caplog.at_level(logging.DEBUG, "omni"):
        _, headers, _ = post(server, "/v1/pipelines/omni_speech", json.dumps(line).encode())
    assert "x-evil" not in headers and "\n" not in headers["x-request-id"]
    assert not any("\n" in each.getMessage() for each in caplog.records)


def test_the_server_still_answers(server: LiveServer) -> None:
    status, _, answer = post(server, "/v1/chat/completions", chat())
    assert status == 200 and answer["choices"][0]["message"]["content"]
