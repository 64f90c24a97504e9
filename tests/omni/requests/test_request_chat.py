"""Chat messages as other programs write them, and sampling for every stage at once."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from engine import ChatPrompt, SamplingParams
from omni.requests.request import OmniRequest
from omni.requests.request_file import RequestError, read_requests

STAGES = {
    "writer": SamplingParams(temperature=0.0, max_tokens=7),
    "encoder": None,
    "reader": SamplingParams(max_tokens=9, min_tokens=2),
}
TEXT = {"type": "text", "text": "What is this?"}
DATA = "data:image/png;base64," + base64.b64encode(b"no image yet").decode()


def read_one(folder: Path, line: Any) -> OmniRequest | RequestError:
    path = folder / "requests.jsonl"
    path.write_text(json.dumps(line), encoding="utf-8")
    (entry,) = read_requests(path, STAGES)
    return entry


def request_of(folder: Path, line: Any) -> OmniRequest:
    entry = read_one(folder, line)
    assert isinstance(entry, OmniRequest), entry
    return entry


def error_of(folder: Path, line: Any) -> str:
    entry = read_one(folder, line)
    assert isinstance(entry, RequestError)
    return entry.message


def asked(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize("key", ["messages", "prompt"])
def test_messages_are_a_chat_by_either_name(key: str, tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "be brief", "name": "the house"},
        {"role": "user", "content": "hello"},
    ]
    assert request_of(tmp_path, {key: messages}).prompt == ChatPrompt(tuple(messages))


def test_a_part_brings_its_image_as_a_file_or_as_data(tmp_path: Path) -> None:
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


def test_a_part_brings_its_sound_as_data(tmp_path: Path) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "WAV"}}
    prompt = request_of(tmp_path, {"messages": asked(sound, TEXT)}).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.multi_modal_data == {"audio": ["data:audio/wav;base64,UklGRg=="]}
    assert list(prompt.messages[0]["content"]) == [{"type": "audio"}, TEXT]


def test_items_of_parts_and_of_lists_come_in_the_order_of_their_parts(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.wav"):
        (tmp_path / name).touch()
    brought = {"type": "image_url", "image_url": {"url": DATA}}
    messages = [
        *asked({"type": "image"}, {"type": "audio"}, brought),
        {"role": "assistant", "content": "I see."},
        *asked({"type": "image"}, brought),
    ]
    line = {"messages": messages, "images": ["a.png", "b.png"], "audio": ["c.wav"]}
    prompt = request_of(tmp_path, line).prompt
    assert isinstance(prompt, ChatPrompt)
    a, b, c = (tmp_path / name for name in ("a.png", "b.png", "c.wav"))
    assert prompt.multi_modal_data == {"image": [a, DATA, b, DATA], "audio": [c]}


@pytest.mark.parametrize("listed", [[], ["a.png"], ["a.png", "a.png", "a.png"]])
def test_what_has_no_part_and_parts_that_have_nothing_are_left_for_the_engine_to_count(
    listed: list[str], tmp_path: Path
) -> None:
    (tmp_path / "a.png").touch()
    parts = ({"type": "image"}, {"type": "image"}, TEXT)
    line = {"messages": asked(*parts), "images": listed or None}
    prompt = request_of(tmp_path, line).prompt
    assert isinstance(prompt, ChatPrompt)
    assert len(prompt.multi_modal_data.get("image", [])) == len(listed)


@pytest.mark.parametrize("url", ["http://x.org/a.png", "HTTPS://x.org/a.png"])
def test_nothing_is_fetched(url: str, tmp_path: Path) -> None:
    line = {"messages": asked({"type": "image_url", "image_url": {"url": url}})}
    assert "nothing is fetched" in error_of(tmp_path, line)


def test_a_file_of_a_part_must_be_there(tmp_path: Path) -> None:
    line = {"messages": asked({"type": "image_url", "image_url": {"url": "absent.png"}})}
    assert "absent.png' cannot be read: No such file or directory" in error_of(tmp_path, line)


def test_sampling_without_a_stage_is_for_every_stage_that_samples(tmp_path: Path) -> None:
    sampling = {"max_tokens": 3, "stop": "end", "reader": {"max_tokens": 5}}
    request = request_of(tmp_path, {"prompt": "x", "sampling": sampling})
    assert request.sampling == {
        "writer": SamplingParams(temperature=0.0, max_tokens=3, stop=("end",)),
        "reader": SamplingParams(max_tokens=5, min_tokens=2, stop=("end",)),
    }


def test_a_field_that_is_a_mapping_is_no_stage(tmp_path: Path) -> None:
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
    ("sampling", "told"),
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
def test_a_mistake_in_sampling_for_all_is_told(sampling: Any, told: str, tmp_path: Path) -> None:
    message = error_of(tmp_path, {"prompt": "x", "sampling": sampling})
    assert told in message
    assert message.endswith('{"prompt": "Once upon a time", "sampling": {"max_tokens": 16}}')


def test_sampling_where_nothing_samples_is_told(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "x", "sampling": {"max_tokens": 1}}')
    (entry,) = read_requests(path, {"encoder": None})
    assert isinstance(entry, RequestError)
    assert "sampling.max_tokens: no stage of this pipeline samples" in entry.message
