"""Lines of ``requests.jsonl`` are said in OpenAI's shapes, or refused by the key that cannot be."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from omni.commands.bench.openai_body import openai_body


def said(line: dict[str, Any], folder: Path = Path()) -> tuple[str, dict[str, Any]]:
    body = openai_body(line, folder)
    return body.path, dict(body.fields)


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
    _, fields = said(line)
    del fields["messages"]
    assert fields == {
        "max_tokens": 3,
        "stages": {"talker": {"seed": 1}},
        "priority": 2,
        "cache_salt": "s",
        "audio": {"voice": "Ethan"},
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
    body = {"model": "other", "messages": [{"role": "user", "content": "x"}], "n": 1}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    assert said(line) == ("/chat/completions", body)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({}, "exactly one of prompt"),
        ({"promt": "x"}, "did you mean 'prompt'"),
        ({"encoder_prompt": "x"}, "encoder_prompt: cannot be said"),
        ({"prompt_embeds": "x.safetensors"}, "prompt_embeds: cannot be said"),
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
            "nowhere.wav' is not there, or is no file",
        ),
        ({"url": "/v1/embeddings", "body": {}}, "url: must be one of /v1/chat/completions"),
        ({"url": "/v1/completions", "body": 3}, "body: must be an object, got 3"),
    ],
)
def test_what_cannot_be_said_is_refused(line: dict[str, Any], told: str, tmp_path: Path):
    with pytest.raises(ValueError) as error:
        openai_body(line, tmp_path)
    assert told in str(error.value)
