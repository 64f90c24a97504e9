"""What is said of a bad line of ``requests.jsonl``: every mistake once, and how to mend it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omni.requests.request_file import RequestError, read_requests


def error_of(folder: Path, line: Any) -> str:
    path = folder / "requests.jsonl"
    path.write_text("\n".join(map(json.dumps, ({"prompt": "a"}, line))), encoding="utf-8")
    _, request = read_requests(path, {})
    assert isinstance(request, RequestError), request
    return request.message


def chat(*parts: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": list(parts)}]}


FILES_ELSEWHERE = (
    "files go into the request's 'images' and 'audio' lists, in the order of their parts"
)
WHOLE_MESSAGES = {
    "a fraction as token id": (
        {"prompt_token_ids": [1.5]},
        "prompt_token_ids[0]: should be a valid integer, got 1.5",
    ),
    "an unknown type": (
        chat({"type": "vidio"}),
        "prompt[0].content[0].type: should be 'text', 'image' or 'audio', got 'vidio'",
    ),
    "another program's part": (
        chat({"type": "image_url", "image_url": {"url": "a.png"}}),
        "prompt[0].content[0].type: should be 'text', 'image' or 'audio', got 'image_url'; "
        "prompt[0].content[0].image_url: unknown key; known are 'type', 'text'; " + FILES_ELSEWHERE,
    ),
    "no role": ({"prompt": [{"content": "x"}]}, "prompt[0].role: missing; it must be given"),
    "no role beyond an encoder": (
        {"encoder_prompt": {"prompt": [{"content": "x"}]}},
        "encoder_prompt.prompt[0].role: missing; it must be given",
    ),
    "a number as content": (
        {"prompt": [{"role": "user", "content": 5}]},
        "prompt[0].content: should be text or a list of parts, got 5",
    ),
    "a number as text": (
        chat({"type": "text", "text": 5}),
        "prompt[0].content[0].text: should be text, got 5",
    ),
    "text of an image": (
        chat({"type": "image", "text": "a cat"}),
        "prompt[0].content[0]: a part of type text has a text, and no other part has",
    ),
    "one message without a list": (
        {"prompt": {"role": "user", "content": "x"}},
        "prompt: should be text or a list of chat messages, got {'role': 'user', 'content': 'x'}",
    ),
    "a number as file": (
        {"audio": [3]},
        "audio[0]: should be the name of a file, or a mapping that has one as 'file', got 3",
    ),
    "a number as encoder prompt": (
        {"encoder_prompt": 5},
        "encoder_prompt: should be a prompt: text, or a mapping with one of prompt, "
        "prompt_token_ids, prompt_embeds, got 5",
    ),
    "another unknown key of a part": (
        chat({"type": "text", "txt": "x", "text": "x"}),
        "prompt[0].content[0].txt: unknown key; did you mean 'text'?",
    ),
}


@pytest.mark.parametrize("mistake", WHOLE_MESSAGES)
def test_one_mistake_is_told_once(mistake: str, tmp_path: Path) -> None:
    line, expected = WHOLE_MESSAGES[mistake]
    assert error_of(tmp_path, line).partition("requests.jsonl:2: ")[2] == expected


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        *(("image", key) for key in ("image", "images", "image_url", "path", "url", "file")),
        *(("audio", key) for key in ("audio", "audio_url", "input_audio", "path", "url", "file")),
    ],
)
def test_a_part_that_carries_its_file_is_told_where_files_go(
    kind: str, key: str, tmp_path: Path
) -> None:
    message = error_of(tmp_path, chat({"type": kind, key: "a.file"}))
    place = f"prompt[0].content[0].{key}: unknown key; known are 'type', 'text'; "
    assert message.endswith(place + FILES_ELSEWHERE)


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": [["x" * 500]]},
        {"prompt_token_ids": ["x" * 500]},
        {"prompt": {"role": "user", "content": "x" * 500}},
        chat({"type": "x" * 500}),
    ],
)
def test_a_long_value_is_not_told_whole(line: Any, tmp_path: Path) -> None:
    message = error_of(tmp_path, line)
    assert message.endswith("...")
    assert len(message.partition("got ")[2]) == 80
