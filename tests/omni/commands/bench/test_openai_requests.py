"""Lines of ``requests.jsonl`` are said in OpenAI's shapes, or refused by the key that cannot be."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from typing import Any

import httpx2
import pytest

from omni.commands.bench.http_target import HttpSettings, OpenAICall, openai_call

HERE = Path()
SAME = ("model", "stream", "stream_options")


def call(endpoint: Any, line: dict[str, Any], folder: Path = HERE, **settings: Any) -> OpenAICall:
    return openai_call(line, folder, HttpSettings("http://x", endpoint=endpoint, **settings), "m")


def said(line: dict[str, Any], folder: Path = HERE) -> tuple[str, dict[str, Any]]:
    """Path and body, without the fields that all requests have."""
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


def test_a_line_of_openais_files_for_batches_is_taken_as_it_is():
    body = {"messages": [{"role": "user", "content": "x"}], "n": 1}
    line = {
        "custom_id": "1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {**body, "model": "other"},
    }
    assert said(line) == ("/chat/completions", body)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({}, "exactly one of prompt"),
        ({"promt": "x"}, "did you mean 'prompt'"),
        ({"encoder_prompt": "x"}, "encoder_prompt: OpenAI's API has no form"),
        ({"prompt_embeds": "x.safetensors"}, "prompt_embeds: OpenAI's API has no form"),
        ({"audio": ["x.wav"]}, "write messages"),
        ({"prompt": "x", "images": ["x.png"]}, "write messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "more parts of type 'image' than files",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "audio": ["x.wav"]},
            "more files than parts of type 'audio'",
        ),
        (
            {
                "messages": [{"role": "user", "content": [{"type": "audio"}]}],
                "audio": ["nowhere.wav"],
            },
            "nowhere.wav' does not exist, or is no file",
        ),
        ({"url": "/v1/embeddings", "body": {}}, "url: must be one of /v1/chat/completions"),
        ({"url": "/v1/completions", "body": 3}, "body: must be an object, got 3"),
    ],
)
def test_what_cannot_be_said_is_refused(line: dict[str, Any], told: str, tmp_path: Path):
    with pytest.raises(ValueError) as error:
        call("chat", line, tmp_path)
    assert told in str(error.value)


def test_speech_is_asked_for_as_a_file_that_tells_its_rate():
    line = {"prompt": "Hi", "speaker": "Ann"}
    body = {"model": "m", "input": "Hi", "response_format": "wav", "voice": "Ann"}
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


@pytest.mark.parametrize(
    ("endpoint", "line", "told"),
    [
        ("speech", {"prompt_token_ids": [1]}, "takes lines with a text as their 'prompt' alone"),
        ("speech", {"prompt": "x", "sampling": {"n": 1}}, "takes lines with a text"),
        ("embeddings", {"promt": "x"}, "did you mean 'prompt'?"),
        ("transcriptions", {"prompt": "x"}, "takes lines with one file as their 'audio'"),
        ("transcriptions", {"audio": ["nowhere.wav"]}, "does not exist"),
    ],
)
def test_lines_that_cannot_be_said_so_are_told(endpoint: Any, line: Any, told: str):
    with pytest.raises(ValueError, match=told.replace("?", r"\?")):
        call(endpoint, line)
