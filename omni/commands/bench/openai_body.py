"""Says a line of ``requests.jsonl`` in the shapes of OpenAI's API."""

from __future__ import annotations

import json
import mimetypes
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from pydantic import ValidationError

from engine.interface.schema_error import explain_validation_error
from omni.requests.request_line import AudioFile, ChatMessage, ContentPart, RequestLine

__all__ = ["OpenAIBody", "openai_body"]

CHAT_PATH = "/chat/completions"
COMPLETIONS_PATH = "/completions"
_PATHS = (CHAT_PATH, COMPLETIONS_PATH)
_UNSAYABLE = ("prompt_embeds", "encoder_prompt", "decoder_prompt")
_SOUND_KINDS = {".wav": "wav", ".mp3": "mp3", ".flac": "flac", ".ogg": "ogg"}


@dataclass(frozen=True, slots=True)
class OpenAIBody:
    """What to post, and where.

    Attributes:
        path: behind ``/v1``.
        fields: the body, without what is the same for all requests.
    """

    path: str
    fields: Mapping[str, Any]


def openai_body(data: Mapping[str, Any], folder: Path) -> OpenAIBody:
    """Say a line in the shapes of OpenAI's API.

    Args:
        data: a line of ``requests.jsonl``, or one of OpenAI's files for batches, with ``url`` and
            ``body``. Sampling fields without a stage are the body's own; those of named stages
            stand under ``stages``, which this project's server knows.
        folder: where the files are that the line names; they become part of the body.

    Raises:
        ValueError: the line is wrong, cannot be said so, or a file is not there.
    """
    if "body" in data:
        return _of_batch(data)
    try:
        line = RequestLine.model_validate_json(json.dumps(dict(data)), strict=True)
    except ValidationError as error:
        told = explain_validation_error(error, RequestLine, dict(data))
        raise ValueError(told.replace("\n", "; ")) from error
    for key in _UNSAYABLE:
        if getattr(line, key) is not None:
            raise ValueError(f"{key}: cannot be said in the shapes of OpenAI's API")
    extra = {
        name: value
        for name, value in (("priority", line.priority), ("cache_salt", line.cache_salt))
        if value
    }
    fields = {**_sampling(line.sampling), **extra}
    if line.speaker is not None:
        fields["audio"] = {"voice": line.speaker}
    messages = line.messages
    if messages is None and isinstance(line.prompt, tuple):
        messages = line.prompt
    if messages is not None:
        spoken = _Messages(line, folder).all(messages)
        return OpenAIBody(CHAT_PATH, {"messages": spoken, **fields})
    if line.images is not None or line.audio is not None or line.videos is not None:
        raise ValueError(
            "files beside a text or token ids cannot be said in the shapes of OpenAI's API; write "
            "messages"
        )
    prompt = line.prompt if line.prompt is not None else list(line.prompt_token_ids or ())
    return OpenAIBody(COMPLETIONS_PATH, {"prompt": prompt, **fields})


def _of_batch(data: Mapping[str, Any]) -> OpenAIBody:
    path = str(data.get("url", "")).removeprefix("/v1")
    if path not in _PATHS:
        known = ", ".join(f"/v1{each}" for each in _PATHS)
        raise ValueError(f"url: must be one of {known}, got {data.get('url')!r:.80}")
    if not isinstance(data["body"], dict):
        raise ValueError(f"body: must be an object, got {data['body']!r:.80}")
    return OpenAIBody(path, data["body"])


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in given.items() if not isinstance(value, Mapping)}
    stages = {key: value for key, value in given.items() if isinstance(value, Mapping)}
    return {**own, **({"stages": stages} if stages else {})}


class _Messages:
    """Writes messages, each placeholder with the next of the line's files."""

    def __init__(self, line: RequestLine, folder: Path) -> None:
        self._folder = folder
        sounds = [each.file if isinstance(each, AudioFile) else each for each in line.audio or ()]
        videos = [each if isinstance(each, str) else each.file for each in line.videos or ()]
        self._files: dict[str, Iterator[str]] = {
            "image": iter(line.images or ()),
            "audio": iter(sounds),
            "video": iter(videos),
        }

    def all(self, messages: tuple[ChatMessage, ...]) -> list[dict[str, Any]]:
        said = [
            {
                "role": message.role,
                **({"name": message.name} if message.name is not None else {}),
                "content": message.content
                if isinstance(message.content, str)
                else [self._part(part) for part in message.content],
            }
            for message in messages
        ]
        for kind, files in self._files.items():
            if next(files, None) is not None:
                raise ValueError(f"more files than parts of type {kind!r} in the messages")
        return said

    def _part(self, part: ContentPart) -> dict[str, Any]:
        if part.type in self._files:
            file = next(self._files[part.type], None)
            if file is None:
                raise ValueError(f"more parts of type {part.type!r} than files")
            return _WRITERS[part.type](self._folder, file)
        if part.type == "input_audio":
            assert part.input_audio is not None
            return {"type": "input_audio", "input_audio": part.input_audio.model_dump()}
        if part.type == "text":
            return {"type": "text", "text": part.text}
        kind = part.type.removesuffix("_url")
        carried = part.image_url if kind == "image" else part.video_url
        url = carried if isinstance(carried, str) else getattr(carried, "url", "")
        return _WRITERS[kind](self._folder, url)


def _image(folder: Path, name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": _data_url(folder, name)}}


def _video(folder: Path, name: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": _data_url(folder, name)}}


def _sound(folder: Path, name: str) -> dict[str, Any]:
    head, _, data = _data_url(folder, name).partition(",")
    suffix = "." + head.partition("/")[2].partition(";")[0].removeprefix("x-")
    kind = _SOUND_KINDS.get(Path(name).suffix.lower()) or _SOUND_KINDS.get(suffix, "wav")
    return {"type": "input_audio", "input_audio": {"data": data, "format": kind}}


_WRITERS: Mapping[str, Callable[[Path, str], dict[str, Any]]] = {
    "image": _image,
    "audio": _sound,
    "video": _video,
}


def _data_url(folder: Path, name: str) -> str:
    scheme = name[:8].lower()
    if scheme.startswith(("data:", "http://", "https://")):
        return name
    if scheme.startswith("file:"):
        name = url2pathname(urlsplit(name).path)
    file = folder / name
    try:
        content = file.read_bytes() if file.is_file() else None
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(file)!r} cannot be read: {error}") from error
    if content is None:
        raise ValueError(f"{str(file)!r} is not there, or is no file")
    kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{b64encode(content).decode()}"
