"""Lines of ``requests.jsonl`` as requests of OpenAI's API."""

from __future__ import annotations

import mimetypes
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit
from urllib.request import url2pathname

import httpx2

from omni.commands.bench.load_sources import parse_line
from omni.commands.bench.measured_request import MeasuredRequest
from omni.commands.bench.openai_answers import read_document, read_events, read_sound
from omni.requests.request_line import AudioFile, ChatMessage, ContentPart, RequestLine

__all__ = ["Endpoint", "HttpSettings", "OpenAICall", "openai_call", "realtime_events"]

Endpoint: TypeAlias = Literal[
    "chat", "completions", "speech", "embeddings", "transcriptions", "realtime"
]
"""What is requested; all but the first two from servers alone."""

_CHAT, _COMPLETIONS = "/chat/completions", "/completions"
_EVENTS, _JSON, _SOUND = "text/event-stream", "application/json", "audio/"
_UNSUPPORTED = ("prompt_embeds", "encoder_prompt", "decoder_prompt")
_SOUND_FORMATS = {".mpeg": "mp3", **{f".{each}": each for each in ("wav", "mp3", "flac", "ogg")}}
_LIST_KEYS = {"image": "images", "audio": "audio", "video": "videos"}


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """A server, and what is requested of it.

    Attributes:
        url: of the server, with or without ``/v1``.
        model: its name there; None: the only one that it has.
        api_key: sent as a bearer token; None sends none.
        speech: whether chats are to be answered by sound as well, streamed as pcm16.
        voice: of the sound; None leaves it to the server.
        endpoint: that is requested; a line itself is either for chats or for completions.
    """

    url: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    speech: bool = False
    voice: str | None = None
    endpoint: Endpoint = "chat"

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            good = False
        if not good or parts.query or parts.fragment:
            raise ValueError(f"--url: must be such as http://localhost:8000, got {self.url!r:.200}")
        if self.voice is not None and not self.speech and self.endpoint != "speech":
            raise ValueError("--voice goes together with --speech, or with --endpoint speech")
        if self.speech and self.endpoint not in ("chat", "realtime"):
            raise ValueError(f"--speech is about chats and realtime, not about {self.endpoint}")

    @property
    def base_url(self) -> str:
        """The URL up to ``/v1``."""
        url = self.url.rstrip("/")
        return url if url.endswith("/v1") else f"{url}/v1"


@dataclass(frozen=True, slots=True)
class OpenAICall:
    """A request to post, and how its answer is read.

    Attributes:
        path: behind ``/v1``.
        body: as httpx takes it: ``json``, or ``data`` and ``files``.
        answer_type: the beginning of the answer's content type.
        read: reads the answer, and returns its text.
    """

    path: str
    body: Mapping[str, Any]
    answer_type: str
    read: Callable[[httpx2.Response, MeasuredRequest], Awaitable[str]]


def openai_call(
    data: Mapping[str, Any], folder: Path, settings: HttpSettings, model: str
) -> OpenAICall:
    """Make a request of a line.

    Args:
        data: a line of ``requests.jsonl``; for chats and completions also one of OpenAI's files
            for batches, with ``url`` and ``body``. Sampling fields without a stage are the body's
            own; those of named stages stand under ``stages``, which this project's server knows.
        folder: where the files are that the line names; they become part of the body.
        settings: of the server.
        model: of the server.

    Raises:
        ValueError: the line is wrong, the API has no form for it, or a file does not exist.
    """
    if settings.endpoint in ("chat", "completions"):
        return _streamed(data, folder, settings, model)
    line = parse_line(data)
    if settings.endpoint == "transcriptions":
        return _transcription(line, folder, model)
    fields = {"model": model, "input": _only_text(line, settings.endpoint)}
    if settings.endpoint == "embeddings":
        return OpenAICall("/embeddings", {"json": fields}, _JSON, read_document)
    fields["response_format"] = "wav"  # the one format that has its sampling rate in it
    voice = settings.voice or line.speaker
    if voice is not None:
        fields["voice"] = voice
    return OpenAICall("/audio/speech", {"json": fields}, _SOUND, read_sound)


def realtime_events(data: Mapping[str, Any], settings: HttpSettings) -> list[Mapping[str, Any]]:
    """The events by which a text is said over ``/v1/realtime``.

    Raises:
        ValueError: the line is wrong, or has more than a text.
    """
    session: dict[str, Any] = {"type": "realtime", "output_modalities": ["text"]}
    if settings.speech:
        session["output_modalities"] = ["audio"]
        if settings.voice is not None:
            session["audio"] = {"output": {"voice": settings.voice}}
    said = {"type": "input_text", "text": _only_text(parse_line(data), settings.endpoint)}
    item = {"type": "message", "role": "user", "content": [said]}
    return [
        {"type": "session.update", "session": session},
        {"type": "conversation.item.create", "item": item},
        {"type": "response.create"},
    ]


def _only_text(line: RequestLine, endpoint: str) -> str:
    others = (line.images, line.audio, line.videos)
    has_others = line.sampling or any(each is not None for each in others)
    if not isinstance(line.prompt, str) or has_others:
        raise ValueError(f"--endpoint {endpoint} takes lines with a text as their 'prompt' alone")
    return line.prompt


def _transcription(line: RequestLine, folder: Path, model: str) -> OpenAICall:
    if line.audio is None or len(line.audio) != 1:
        raise ValueError(
            "--endpoint transcriptions takes lines with one file as their 'audio', of --input"
        )
    if line.sampling:
        raise ValueError("sampling: --endpoint transcriptions has no form for it")
    (sound,) = line.audio
    wanted = sound if isinstance(sound, AudioFile) else AudioFile(file=sound)
    fields = {"model": model, "response_format": "json"}
    if wanted.language is not None:
        fields["language"] = wanted.language
    file = folder / wanted.file
    form = {"data": fields, "files": {"file": (file.name, _content(file))}}
    path = "/audio/translations" if wanted.task == "translate" else "/audio/transcriptions"
    return OpenAICall(path, form, _JSON, read_document)


def _streamed(
    data: Mapping[str, Any], folder: Path, settings: HttpSettings, model: str
) -> OpenAICall:
    path, given = _of_batch(data) if "body" in data else _of_line(parse_line(data), folder)
    fields: dict[str, Any] = {**given, "model": model, "stream": True}
    fields["stream_options"] = {"include_usage": True}
    if path == _CHAT and settings.speech:
        fields.setdefault("modalities", ["text", "audio"])
    if "audio" in fields.get("modalities", ()):
        voice = {} if settings.voice is None else {"voice": settings.voice}
        fields["audio"] = {**voice, **fields.get("audio", {}), "format": "pcm16"}
    elif "audio" in fields:  # a voice, but the answer is text
        del fields["audio"]
    return OpenAICall(path, {"json": fields}, _EVENTS, read_events)


def _of_batch(data: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    path = str(data.get("url", "")).removeprefix("/v1")
    if path not in (_CHAT, _COMPLETIONS):
        raise ValueError(
            f"url: must be one of /v1{_CHAT}, /v1{_COMPLETIONS}, got {data.get('url')!r:.80}"
        )
    if not isinstance(data["body"], dict):
        raise ValueError(f"body: must be an object, got {data['body']!r:.80}")
    return path, data["body"]


def _of_line(line: RequestLine, folder: Path) -> tuple[str, Mapping[str, Any]]:
    for key in _UNSUPPORTED:
        if getattr(line, key) is not None:
            raise ValueError(f"{key}: OpenAI's API has no form for it")
    sampling = line.sampling
    fields = {key: value for key, value in sampling.items() if not isinstance(value, Mapping)}
    stages = {key: value for key, value in sampling.items() if key not in fields}
    optional = {"stages": stages, "priority": line.priority, "cache_salt": line.cache_salt}
    fields |= {key: value for key, value in optional.items() if value}
    if line.speaker is not None:
        fields["audio"] = {"voice": line.speaker}
    messages = line.messages
    if messages is None and isinstance(line.prompt, tuple):
        messages = line.prompt
    if messages is not None:
        return _CHAT, {"messages": _messages(messages, line, folder), **fields}
    if line.images is not None or line.audio is not None or line.videos is not None:
        raise ValueError(
            "OpenAI's API has no form for files beside a text or token ids; write messages"
        )
    prompt = line.prompt if line.prompt is not None else list(line.prompt_token_ids or ())
    return _COMPLETIONS, {"prompt": prompt, **fields}


def _messages(
    messages: tuple[ChatMessage, ...], line: RequestLine, folder: Path
) -> list[dict[str, Any]]:
    """Write messages, each placeholder with the next of the line's files."""
    files = {kind: iter(getattr(line, key) or ()) for kind, key in _LIST_KEYS.items()}

    def part_of(part: ContentPart) -> dict[str, Any]:
        if part.type in files:
            file = next(files[part.type], None)
            if file is None:
                raise ValueError(f"more parts of type {part.type!r} than files")
            return _file_part(part.type, file if isinstance(file, str) else file.file, folder)
        url = part.image_url or part.video_url
        if url is None:
            return part.model_dump(exclude_none=True)
        kind = part.type.removesuffix("_url")
        return _file_part(kind, url if isinstance(url, str) else url.url, folder)

    written = []
    for message in messages:
        fields = message.model_dump(include={"role", "name"}, exclude_none=True)
        content = message.content
        parts = content if isinstance(content, str) else [part_of(each) for each in content]
        written.append({**fields, "content": parts})
    for kind, left in files.items():
        if next(left, None) is not None:
            raise ValueError(f"more files than parts of type {kind!r} in the messages")
    return written


def _file_part(kind: str, name: str, folder: Path) -> dict[str, Any]:
    url = _data_url(folder, name)
    if kind != "audio":
        return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}
    head, _, data = url.partition(",")
    subtype = "." + head.partition("/")[2].partition(";")[0].removeprefix("x-")
    suffix = Path(name).suffix.lower()
    name = _SOUND_FORMATS.get(suffix) or _SOUND_FORMATS.get(subtype, "wav")
    return {"type": "input_audio", "input_audio": {"data": data, "format": name}}


def _data_url(folder: Path, name: str) -> str:
    scheme = name[:8].lower()
    if scheme.startswith(("data:", "http://", "https://")):
        return name
    if scheme.startswith("file:"):
        name = url2pathname(urlsplit(name).path)
    file = folder / name
    kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{b64encode(_content(file)).decode()}"


def _content(file: Path) -> bytes:
    try:
        if not file.is_file():
            raise ValueError(f"{str(file)!r} does not exist, or is no file")
        return file.read_bytes()
    except OSError as error:
        raise ValueError(f"{str(file)!r} cannot be read: {error}") from error
