"""Error messages of ``requests.jsonl``: each mistake once, and how to fix it."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine import ChatPrompt, SamplingParams
from omni.requests.request import OmniRequest
from omni.requests.request_file import RequestError, read_requests
from omni.requests.request_line import example_line
from tests.support.tables import rows


def error_of(folder: Path, line: Any) -> str:
    return message_of(folder, line).partition("; a right line: ")[0]


def message_of(folder: Path, line: Any) -> str:
    path = folder / "requests.jsonl"
    path.write_text("\n".join(map(json.dumps, ({"prompt": "a"}, line))), encoding="utf-8")
    _, request = read_requests(path, {"writer": SamplingParams(), "encoder": None})
    assert isinstance(request, RequestError), request
    return request.message


def asked(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def chat(*parts: Any) -> dict[str, Any]:
    return {"prompt": asked(*parts)}


FILES_ELSEWHERE = (
    "files go into the request's 'images', 'audio' and 'videos' lists, in the order of their parts"
)
# A line, or a part of its only message; and its error.
WHOLE_MESSAGES = rows(r"""
{"prompt_token_ids": [1.5]} | prompt_token_ids[0]: should be a valid integer, got 1.5
{"type": "vidio"} | prompt[0].content[0].type: should be 'text', 'image', 'audio', 'video', \
'image_url', 'input_audio' or 'video_url', got 'vidio'
{"type": "image", "path": "a.png"} | prompt[0].content[0].path: unknown key; FILES_ELSEWHERE
{"type": "image_url", "image_url": 3} | prompt[0].content[0].image_url: should be a file, or a \
mapping that has it as 'url', got 3
{"type": "image_url"} | prompt[0].content[0]: a part of type image_url has an image_url, and no \
other part has
{"prompt": "x", "sampling": {"max_tokens": 1.5}} | sampling.max_tokens: should be a valid \
integer, got 1.5
{"prompt": "x", "sampling": {"temperature": 0, "writer": {"max_tokens": 1.5}}} | \
sampling.writer.max_tokens: should be a valid integer, got 1.5
{"prompt": "x", "sampling": {"max_token": 3}} | sampling.max_token: unknown key; did you mean \
'max_tokens'?
{"prompt": [{"content": "x"}]} | prompt[0].role: missing; it must be given
{"encoder_prompt": {"prompt": [{"content": "x"}]}} | encoder_prompt.prompt[0].role: missing; it \
must be given
{"prompt": [{"role": "user", "content": 5}]} | prompt[0].content: should be text or a list of \
parts, got 5
{"type": "text", "text": 5} | prompt[0].content[0].text: should be text, got 5
{"type": "image", "text": "a cat"} | prompt[0].content[0]: a part of type text has a text, and no \
other part has
{"prompt": {"role": "user", "content": "x"}} | prompt: should be text or a list of chat messages, \
got {'role': 'user', 'content': 'x'}
{"audio": [3]} | audio[0]: should be the name of a file, or a mapping that has one as 'file', got 3
{"encoder_prompt": 5} | encoder_prompt: should be a prompt: text, or a mapping with one of \
prompt, messages, prompt_token_ids, prompt_embeds, got 5
{"type": "text", "txt": "x", "text": "x"} | prompt[0].content[0].txt: unknown key; did you mean \
'text'?
""")


@pytest.mark.parametrize(("text", "expected"), WHOLE_MESSAGES)
def test_a_mistake_is_reported_once(text: str, expected: str, tmp_path: Path) -> None:
    line = json.loads(text)
    message = error_of(tmp_path, chat(line) if "type" in line else line)
    expected = expected.replace("FILES_ELSEWHERE", FILES_ELSEWHERE)
    assert message.partition("requests.jsonl:2: ")[2] == expected


OF_OTHER_PROGRAMS = {
    "a field of sampling": (
        {"prompt": "x", "max_tokens": 5},
        "max_tokens: unknown key; it belongs into 'sampling'; a right line: "
        '{"prompt": "Once upon a time", "sampling": {"max_tokens": 5}}',
    ),
    "the keys of OpenAI's requests": (
        {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 5, "model": "m"},
        "max_completion_tokens: unknown key; it belongs into 'sampling'; model: unknown key; "
        "leave it out: the pipeline says which models run; a right line: "
        '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], '
        '"sampling": {"max_tokens": 5}}',
    ),
}


@pytest.mark.parametrize("mistake", OF_OTHER_PROGRAMS)
def test_keys_of_other_programs_are_shown_in_the_right_place(mistake: str, tmp_path: Path) -> None:
    line, expected = OF_OTHER_PROGRAMS[mistake]
    assert message_of(tmp_path, line).partition("requests.jsonl:2: ")[2] == expected


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        *(("image", key) for key in ("image", "images", "path", "url", "file")),
        *(("audio", key) for key in ("audio", "audio_url", "path", "url", "file")),
    ],
)
def test_an_error_for_a_file_within_a_part_says_where_files_go(
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
def test_a_long_value_is_shortened(line: Any, tmp_path: Path) -> None:
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
def test_the_suggested_line_is_valid_and_has_the_keys_of_the_mistake(
    case: str, tmp_path: Path
) -> None:
    save_file({"rows": torch.zeros(2, 4)}, tmp_path / "rows.safetensors")
    for name in ("photo.png", "question.wav"):
        (tmp_path / name).touch()
    wrong, stages = EXAMPLES[case], {"writer": SamplingParams()}
    message = chat_error_of(tmp_path, wrong | {"x": 1}, stages)
    _, shown, example = message.partition("; a right line: ")
    assert shown and example == example_line(wrong)
    right = json.loads(example)
    assert isinstance(read_one(tmp_path, right, stages), OmniRequest)
    if case == "all others":
        assert set(wrong) <= set(right)


STAGES = {
    "writer": SamplingParams(temperature=0.0, max_tokens=7),
    "encoder": None,
    "reader": SamplingParams(max_tokens=9, min_tokens=2),
}
TEXT = {"type": "text", "text": "What is this?"}
DATA = "data:image/png;base64," + base64.b64encode(b"no image yet").decode()


def read_one(folder: Path, line: Any, stages: Any = STAGES) -> OmniRequest | RequestError:
    path = folder / "requests.jsonl"
    path.write_text(json.dumps(line), encoding="utf-8")
    (entry,) = read_requests(path, stages)
    return entry


def request_of(folder: Path, line: Any) -> OmniRequest:
    entry = read_one(folder, line)
    assert isinstance(entry, OmniRequest), entry
    return entry


def chat_error_of(folder: Path, line: Any, stages: Any = STAGES) -> str:
    entry = read_one(folder, line, stages)
    assert isinstance(entry, RequestError)
    return entry.message


@pytest.mark.parametrize("key", ["messages", "prompt"])
def test_messages_are_a_chat_by_either_name(key: str, tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "be brief", "name": "the house"},
        {"role": "user", "content": "hello"},
    ]
    assert request_of(tmp_path, {key: messages}).prompt == ChatPrompt(tuple(messages))


def test_a_part_has_its_image_as_a_file_or_as_data(tmp_path: Path) -> None:
    (tmp_path / "a b.png").touch()
    parts = [
        {"type": "image_url", "image_url": {"url": "a b.png", "detail": "low"}},
        {"type": "image_url", "image_url": "a b.png"},
        {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/a%20b.png"}},
        {"type": "image_url", "image_url": {"url": DATA}},
        TEXT,
    ]
    prompt = request_of(tmp_path, {"messages": asked(*parts)}).prompt
    assert isinstance(prompt, ChatPrompt)
    file = tmp_path / "a b.png"
    assert prompt.multi_modal_data == {"image": [file, file, file, DATA]}
    assert list(prompt.messages[0]["content"]) == [{"type": "image"}] * 4 + [TEXT]


def test_a_part_has_its_sound_as_data(tmp_path: Path) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "WAV"}}
    prompt = request_of(tmp_path, {"messages": asked(sound, TEXT)}).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.multi_modal_data == {"audio": ["data:audio/wav;base64,UklGRg=="]}
    assert list(prompt.messages[0]["content"]) == [{"type": "audio"}, TEXT]


def test_items_of_parts_and_of_lists_come_in_the_order_of_their_parts(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.wav"):
        (tmp_path / name).touch()
    own = {"type": "image_url", "image_url": {"url": DATA}}
    messages = [
        *asked({"type": "image"}, {"type": "audio"}, own),
        {"role": "assistant", "content": "I see."},
        *asked({"type": "image"}, own),
    ]
    line = {"messages": messages, "images": ["a.png", "b.png"], "audio": ["c.wav"]}
    prompt = request_of(tmp_path, line).prompt
    assert isinstance(prompt, ChatPrompt)
    a, b, c = (tmp_path / name for name in ("a.png", "b.png", "c.wav"))
    assert prompt.multi_modal_data == {"image": [a, DATA, b, DATA], "audio": [c]}


@pytest.mark.parametrize("listed", [[], ["a.png"], ["a.png", "a.png", "a.png"]])
def test_the_engine_compares_the_numbers_of_files_and_parts(
    listed: list[str], tmp_path: Path
) -> None:
    (tmp_path / "a.png").touch()
    parts = ({"type": "image"}, {"type": "image"}, TEXT)
    line = {"messages": asked(*parts), "images": listed or None}
    prompt = request_of(tmp_path, line).prompt
    assert isinstance(prompt, ChatPrompt)
    assert len(prompt.multi_modal_data.get("image", [])) == len(listed)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://x.org/a.png", "nothing is fetched"),
        ("HTTPS://x.org/a.png", "nothing is fetched"),
        ("absent.png", "absent.png' cannot be read: No such file or directory"),
    ],
)
def test_a_part_needs_an_existing_local_file(url: str, expected: str, tmp_path: Path) -> None:
    line = {"messages": asked({"type": "image_url", "image_url": {"url": url}})}
    assert expected in chat_error_of(tmp_path, line)


def test_the_error_of_a_missing_file_suggests_no_line(tmp_path: Path) -> None:
    assert "a right line" not in chat_error_of(tmp_path, {"audio": ["absent.wav"]})


def test_sampling_without_a_stage_is_for_every_stage_that_samples(tmp_path: Path) -> None:
    sampling = {"max_tokens": 3, "stop": "end", "reader": {"max_tokens": 5}}
    request = request_of(tmp_path, {"prompt": "x", "sampling": sampling})
    assert request.sampling == {
        "writer": SamplingParams(temperature=0.0, max_tokens=3, stop=("end",)),
        "reader": SamplingParams(max_tokens=5, min_tokens=2, stop=("end",)),
    }


def test_a_field_whose_value_is_a_mapping_is_not_a_stage(tmp_path: Path) -> None:
    sampling = {"logit_bias": {"5": -1}, "reader": {"logit_bias": {"7": 2.5}}}
    request = request_of(tmp_path, {"prompt": "x", "sampling": sampling})
    found = {stage: params.logit_bias for stage, params in request.sampling.items()}  # type: ignore[union-attr]
    assert found == {"writer": {5: -1.0}, "reader": {7: 2.5}}


def test_a_stage_may_be_called_like_a_field(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "x", "sampling": {"seed": {"seed": 3}}}\n{"prompt": "x", '
                    '"sampling": {"seed": 4}}')  # fmt: skip
    for entry, seed in zip(read_requests(path, {"seed": SamplingParams()}), (3, 4), strict=True):
        assert isinstance(entry, OmniRequest)
        assert entry.sampling == {"seed": SamplingParams(seed=seed)}


@pytest.mark.parametrize(
    ("sampling", "reported"),
    [
        ({"max_tokens": 1}, "sampling: min_tokens (2) is larger than max_tokens (1)"),
        ({"max_tokens": -1}, "sampling.max_tokens: should be greater than or equal to 0, got -1"),
        ({"max_tokens": "x"}, "sampling.max_tokens: should be a valid integer, got 'x'"),
        ({"max_tokens": {"writer": 1}}, "sampling.max_tokens: should be a valid integer, got {"),
        ({"logit_bias": {"5": 101}}, "sampling.logit_bias.5: should be a number from -100 to 100"),
        ({"logit_bias": {"x": 1}}, "sampling.logit_bias: should have token ids as keys"),
        ({"reeder": {"max_tokens": 1}}, "sampling.reeder: unknown stage; did you mean 'reader'?"),
    ],
)
def test_a_mistake_in_sampling_for_all_stages_is_reported(
    sampling: Any, reported: str, tmp_path: Path
) -> None:
    message = chat_error_of(tmp_path, {"prompt": "x", "sampling": sampling})
    assert reported in message
    assert message.endswith('{"prompt": "Once upon a time", "sampling": {"max_tokens": 16}}')


def test_sampling_without_a_stage_that_samples_is_an_error(tmp_path: Path) -> None:
    line = {"prompt": "x", "sampling": {"max_tokens": 1}}
    message = chat_error_of(tmp_path, line, {"encoder": None})
    assert "sampling.max_tokens: no stage of this pipeline samples" in message
