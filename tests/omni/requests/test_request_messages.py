"""What is said of a bad line of ``requests.jsonl``: every mistake once, and how to mend it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine import SamplingParams
from omni.requests.request import OmniRequest
from omni.requests.request_file import RequestError, read_requests
from omni.requests.request_line import example_line


def error_of(folder: Path, line: Any) -> str:
    return message_of(folder, line).partition("; a right line: ")[0]


def message_of(folder: Path, line: Any) -> str:
    path = folder / "requests.jsonl"
    path.write_text("\n".join(map(json.dumps, ({"prompt": "a"}, line))), encoding="utf-8")
    _, request = read_requests(path, {"writer": SamplingParams(), "encoder": None})
    assert isinstance(request, RequestError), request
    return request.message


def chat(*parts: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": list(parts)}]}


FILES_ELSEWHERE = (
    "files go into the request's 'images', 'audio' and 'videos' lists, in the order of their parts"
)
WHOLE_MESSAGES = {
    "a fraction as token id": (
        {"prompt_token_ids": [1.5]},
        "prompt_token_ids[0]: should be a valid integer, got 1.5",
    ),
    "an unknown type": (
        chat({"type": "vidio"}),
        "prompt[0].content[0].type: should be 'text', 'image', 'audio', 'video', "
        "'image_url', 'input_audio' or 'video_url', got 'vidio'",
    ),
    "another program's part": (
        chat({"type": "image", "path": "a.png"}),
        "prompt[0].content[0].path: unknown key; " + FILES_ELSEWHERE,
    ),
    "an address that is a number": (
        chat({"type": "image_url", "image_url": 3}),
        "prompt[0].content[0].image_url: should be a file, or a mapping that has it as 'url', "
        "got 3",
    ),
    "an image_url without one": (
        chat({"type": "image_url"}),
        "prompt[0].content[0]: a part of type image_url has an image_url, and no other part has",
    ),
    "a fraction for all stages": (
        {"prompt": "x", "sampling": {"max_tokens": 1.5}},
        "sampling.max_tokens: should be a valid integer, got 1.5",
    ),
    "a fraction for one stage": (
        {"prompt": "x", "sampling": {"temperature": 0, "writer": {"max_tokens": 1.5}}},
        "sampling.writer.max_tokens: should be a valid integer, got 1.5",
    ),
    "a field that nobody has, for all stages": (
        {"prompt": "x", "sampling": {"max_token": 3}},
        "sampling.max_token: unknown key; did you mean 'max_tokens'?",
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
        "encoder_prompt: should be a prompt: text, or a mapping with one of prompt, messages, "
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


OF_OTHER_PROGRAMS = {
    "a field of sampling": (
        {"prompt": "x", "max_tokens": 5},
        "max_tokens: unknown key; it belongs into 'sampling'; a right line: "
        '{"prompt": "Once upon a time", "sampling": {"max_tokens": 5}}',
    ),
    "what OpenAI's requests say beside messages": (
        {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 5, "model": "m"},
        "max_completion_tokens: unknown key; it belongs into 'sampling'; model: unknown key; "
        "leave it out: the pipeline says which models run; a right line: "
        '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], '
        '"sampling": {"max_tokens": 5}}',
    ),
}


@pytest.mark.parametrize("mistake", OF_OTHER_PROGRAMS)
def test_what_other_programs_write_beside_a_prompt_is_shown_at_its_place(
    mistake: str, tmp_path: Path
) -> None:
    line, expected = OF_OTHER_PROGRAMS[mistake]
    assert message_of(tmp_path, line).partition("requests.jsonl:2: ")[2] == expected


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        *(("image", key) for key in ("image", "images", "path", "url", "file")),
        *(("audio", key) for key in ("audio", "audio_url", "path", "url", "file")),
    ],
)
def test_a_part_that_carries_its_file_is_told_where_files_go(
    kind: str, key: str, tmp_path: Path
) -> None:
    message = error_of(tmp_path, chat({"type": kind, key: "a.file"}))
    place = f"prompt[0].content[0].{key}: unknown key; "
    assert place in message
    assert message.endswith(FILES_ELSEWHERE)


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


EXAMPLES: dict[str, dict[str, Any]] = {
    "no JSON": {},
    "text": {"prompt": 3},
    "messages": {"messages": "x"},
    "messages as prompt": {"prompt": [{"role": 3}]},
    "parts of text": chat({"type": "text", "txt": "x"}),
    "parts of images": chat({"type": "image_url", "image_url": 3}),
    "parts of sound": chat({"type": "input_audio", "input_audio": "x"}),
    "ids": {"prompt_token_ids": 3},
    "embeddings": {"prompt_embeds": 3},
    "an encoder prompt": {"encoder_prompt": 3},
    "both sides": {"encoder_prompt": 3, "decoder_prompt": 3},
    "a decoder prompt": {"decoder_prompt": 3},
    "sound": {"audio": 3},
    "images": {"images": 3},
    "images beside text": {"images": 3, "prompt": "x"},
    "sound beside text": {"audio": 3, "prompt": "x"},
    "all others": {
        "request_id": 3, "sampling": 3, "priority": "x", "cache_salt": 3, "speaker": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", EXAMPLES)
def test_the_right_line_beside_a_mistake_is_right_and_has_its_keys(
    case: str, tmp_path: Path
) -> None:
    save_file({"rows": torch.zeros(2, 4)}, tmp_path / "rows.safetensors")
    for name in ("photo.png", "question.wav"):
        (tmp_path / name).touch()
    path = tmp_path / "requests.jsonl"
    wrong = EXAMPLES[case]
    path.write_text(json.dumps(wrong | {"x": 1}), encoding="utf-8")
    (error,) = read_requests(path, {"writer": SamplingParams()})
    assert isinstance(error, RequestError)
    _, shown, example = error.message.partition("; a right line: ")
    assert shown and example == example_line(wrong)
    path.write_text(example, encoding="utf-8")
    (request,) = read_requests(path, {"writer": SamplingParams()})
    assert isinstance(request, OmniRequest), request
    if case == "all others":
        assert set(wrong) <= set(json.loads(example))


def test_a_missing_file_needs_no_other_line(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"audio": ["absent.wav"]}', encoding="utf-8")
    (error,) = read_requests(path, {})
    assert isinstance(error, RequestError)
    assert "a right line" not in error.message
