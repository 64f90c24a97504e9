"""Says a line of ``requests.jsonl`` to the addresses that are neither chats nor completions."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engine.interface.schema_error import explain_validation_error
from omni.commands.bench.http_call import HttpCall, read_document, read_sound
from omni.commands.bench.http_settings import Endpoint
from omni.requests.request_line import AudioFile, RequestLine

__all__ = ["openai_call", "said_text"]


def openai_call(
    endpoint: Endpoint, data: Mapping[str, Any], folder: Path, model: str, voice: str | None
) -> HttpCall:
    """Make a request for speech, embeddings or a transcription.

    Args:
        endpoint: which.
        data: a line of ``requests.jsonl``: a text as its prompt, or, to be transcribed, one file
            of sound.
        folder: where that file is looked for.
        model: of the server.
        voice: that is to speak; None leaves it to the line, and to the server.

    Raises:
        ValueError: the line is wrong or says something else, or a file is not there.
    """
    line = _line(data)
    if endpoint == "transcriptions":
        return _transcription(line, folder, model)
    fields: dict[str, Any] = {"model": model, "input": _text(line, endpoint)}
    if endpoint == "embeddings":
        return _json("/embeddings", fields, "application/json", is_sound=False)
    speaker = voice if voice is not None else line.speaker
    fields["response_format"] = "wav"  # which tells its sampling rate
    if speaker is not None:
        fields["voice"] = speaker
    return _json("/audio/speech", fields, "audio/", is_sound=True)


def said_text(data: Mapping[str, Any], endpoint: Endpoint) -> str:
    """The text of a line that says nothing else.

    Raises:
        ValueError: it does.
    """
    return _text(_line(data), endpoint)


def _line(data: Mapping[str, Any]) -> RequestLine:
    try:
        return RequestLine.model_validate_json(json.dumps(dict(data)), strict=True)
    except ValidationError as error:
        told = explain_validation_error(error, RequestLine, dict(data))
        raise ValueError(told.replace("\n", "; ")) from error


def _text(line: RequestLine, endpoint: str) -> str:
    others = (line.images, line.audio, line.videos)
    has_others = line.sampling or any(each is not None for each in others)
    if not isinstance(line.prompt, str) or has_others:
        raise ValueError(f"--endpoint {endpoint} takes lines with a text as their 'prompt' alone")
    return line.prompt


def _json(path: str, fields: Mapping[str, Any], answer_type: str, *, is_sound: bool) -> HttpCall:
    content = json.dumps(fields).encode()
    reader = read_sound if is_sound else read_document
    return HttpCall(path, content, "application/json", answer_type, reader)


def _transcription(line: RequestLine, folder: Path, model: str) -> HttpCall:
    """A form, as browsers send it."""
    if line.audio is None or len(line.audio) != 1:
        raise ValueError(
            "--endpoint transcriptions takes lines with one file as their 'audio', of --input"
        )
    if line.sampling:
        raise ValueError("sampling: cannot be said to --endpoint transcriptions")
    (sound,) = line.audio
    asked = sound if isinstance(sound, AudioFile) else AudioFile(file=sound)
    file = folder / asked.file
    try:
        content = file.read_bytes()
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(file)!r} cannot be read: {error}") from error
    fields = {"model": model, "response_format": "json"}
    if asked.language is not None:
        fields["language"] = asked.language
    mark = uuid.uuid4().hex
    parts = [
        f'--{mark}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    name = json.dumps(file.name)  # its quotes, and nothing that would end them
    head = f'--{mark}\r\nContent-Disposition: form-data; name="file"; filename={name}\r\n\r\n'
    body = b"".join([*parts, head.encode(), content, f"\r\n--{mark}--\r\n".encode()])
    path = "/audio/translations" if asked.task == "translate" else "/audio/transcriptions"
    kind = f"multipart/form-data; boundary={mark}"
    return HttpCall(path, body, kind, "application/json", read_document)
