"""A line of ``requests.jsonl`` that is right, to show beside one that is not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from omni.requests.request_line import SAMPLING_KEYS

__all__ = ["example_line"]

_TEXT = "Once upon a time"
_QUESTION: Mapping[str, Any] = {"type": "text", "text": "What is this?"}
_IMAGE: Mapping[str, Any] = {"type": "image_url", "image_url": {"url": "photo.png"}}
_FORMS: Mapping[str, Mapping[str, Any]] = {
    "prompt_token_ids": {"prompt_token_ids": [1, 2, 3]},
    "prompt_embeds": {"prompt_embeds": "rows.safetensors"},
    "encoder_prompt": {"encoder_prompt": "The door was open."},
    "decoder_prompt": {"encoder_prompt": "The door was open.", "decoder_prompt": "It"},
    "audio": {"audio": ["question.wav"]},
    "images": {"images": ["photo.png"], "decoder_prompt": "What is this?"},
}
_BESIDE: Mapping[str, Any] = {
    "request_id": "first",
    "sampling": {"max_tokens": 16},
    "priority": 0,
    "cache_salt": "mine",
    "speaker": "Ethan",
}


def example_line(data: Mapping[str, Any]) -> str:
    """Write a line of the kind that somebody seems to have meant.

    Args:
        data: what they wrote; nothing if it was no JSON object.
    """
    line = dict(_form(data))
    line |= {key: value for key, value in _BESIDE.items() if key in data}
    if sampling := _sampling_beside(data):
        line["sampling"] = sampling
    return json.dumps(line)


def _sampling_beside(data: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers that were written beside the prompt, by the names that they have in sampling."""
    return {
        SAMPLING_KEYS[key]: value
        for key, value in data.items()
        if key in SAMPLING_KEYS and isinstance(value, int | float)
    }


def _form(data: Mapping[str, Any]) -> Mapping[str, Any]:
    prompt = data.get("messages", data.get("prompt"))
    if prompt is None:
        forms = (form for key, form in _FORMS.items() if key in data)
        return next(forms, {"prompt": _TEXT})
    types = _types_of_parts(prompt)
    if types & {"audio", "input_audio"} or "audio" in data:
        return {"messages": _asked([{"type": "audio"}, _QUESTION]), "audio": ["question.wav"]}
    if types & {"image", "image_url"} or "images" in data:
        return {"messages": _asked([_IMAGE, _QUESTION])}
    if types:
        return {"messages": _asked([_QUESTION])}
    if "messages" in data or isinstance(prompt, list | dict):
        return {"messages": _asked("Why is the sky blue?")}
    return {"prompt": _TEXT}


def _asked(content: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def _types_of_parts(prompt: object) -> set[str]:
    """What types the parts of messages are of, as far as they can be made out."""
    messages = prompt if isinstance(prompt, list) else [prompt]
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return {str(part.get("type")) for part in parts if isinstance(part, dict)}
