"""A server with OpenAI's API as a load target."""

from __future__ import annotations

import json
import mimetypes
import os
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode, urlsplit
from urllib.request import url2pathname

import httpx2
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus, WebSocketException

from omni.commands.bench.flags import BenchFlags
from omni.commands.bench.load import MeasuredRequest, RequestFailure, Send
from omni.requests.request_line import ChatMessage, ContentPart, RequestLine, parse_line

_DONE = "[DONE]"
_DEFAULT_RATE = 24_000
"""Samples per second of OpenAI's pcm16, and of servers that do not report a rate."""

_SAMPLE_BYTES = 2
_MAX_BYTES = 64 * 2**20
"""Maximum size of an event and of a session's message."""

_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


async def read_events(response: httpx2.Response, record: MeasuredRequest) -> str:
    """Read the server-sent events of a chat or of completions, and return the text.

    Raises:
        RequestFailure: an event is unreadable or an error, or the stream ends too early.
    """
    events = AnswerEvents(record)
    try:
        async for event in httpx2.EventSource(response, max_event_size=_MAX_BYTES):
            if event.data:
                events.take(event.data)
    except httpx2.SSEError as error:
        raise RequestFailure("unreadable event", str(error)) from error
    if not events.may_end:
        message = "the stream ended without [DONE], and before every completion said why it ended"
        raise RequestFailure("cut off", message)
    return events.text


async def read_sound(response: httpx2.Response, record: MeasuredRequest) -> str:
    """Read streamed ``pcm``: 16-bit samples, 24,000 per second on every server.

    Raises:
        RequestFailure: the answer has no samples.
    """
    async for chunk in response.aiter_bytes():
        if chunk:
            record.audio(len(chunk) / _SAMPLE_BYTES / _DEFAULT_RATE)
    if not record.audio_s:
        raise RequestFailure("no sound", "the answer has no samples")
    return ""


async def read_document(response: httpx2.Response, record: MeasuredRequest) -> str:
    """Read one JSON document: embeddings, or a transcription, whose text is returned.

    Raises:
        RequestFailure: the answer is neither.
    """
    content = await response.aread()
    try:
        answer: Any = json.loads(content)
        usage = answer.get("usage") or {}
        if "text" not in answer and not answer["data"][0]["embedding"]:
            raise ValueError("it has neither a text nor an embedding")
        # The usage of transcriptions may count seconds instead.
        prompt = usage.get("prompt_tokens")
        record.usage(prompt if isinstance(prompt, int) else None, None, None)
        return str(answer.get("text", ""))
    except _UNREADABLE as error:
        raise _unreadable("answer", error, content) from error


class AnswerEvents:
    """Reader of the events of one answer to a chat or completions request.

    Attributes:
        is_complete: true once the last event has arrived.
        text: text of the first completion so far.
    """

    def __init__(self, record: MeasuredRequest) -> None:
        self._record = record
        self._has_ended: dict[int, bool] = {}  # by completion
        self.is_complete = False
        self.text = ""

    @property
    def may_end(self) -> bool:
        """True if no more events are required: some servers omit the last one."""
        return self.is_complete or (bool(self._has_ended) and all(self._has_ended.values()))

    def take(self, data: str) -> None:
        """Process one event; ``RequestFailure`` if it is unreadable or reports an error."""
        if data.strip() == _DONE:
            self.is_complete = True
            return
        try:
            event = json.loads(data)
            if not isinstance(event, dict):
                raise ValueError("it is no object")
            if event.get("error"):
                raise RequestFailure("error in the stream", error_text(event))
            for choice in event.get("choices") or ():
                self._handle_choice(choice)
            usage = event.get("usage")
            if usage:
                details = usage.get("prompt_tokens_details") or {}
                self._record.usage(
                    _count(usage.get("prompt_tokens")),
                    _count(details.get("cached_tokens")),
                    _count(usage.get("completion_tokens")),
                )
        except _UNREADABLE as error:
            raise _unreadable("event", error, data) from error

    def _handle_choice(self, choice: Mapping[str, Any]) -> None:
        index = choice.get("index") or 0
        self._has_ended[index] = bool(self._has_ended.get(index) or choice.get("finish_reason"))
        delta = choice.get("delta") or {}
        text = (choice.get("text") or "") + (delta.get("content") or "")
        # Servers have two names for the reasoning text before the answer.
        if text or delta.get("reasoning_content") or delta.get("reasoning"):
            self._record.text()
        if not index:
            self.text += text
        audio = delta.get("audio") or {}
        if audio.get("data"):
            self._record.audio(_pcm_seconds(audio["data"], audio.get("sampling_rate")))


class RealtimeEvents:
    """Reader of the events of one answer over ``/v1/realtime``."""

    def __init__(self, record: MeasuredRequest) -> None:
        self._record = record
        self.is_complete = False
        self.text = ""

    def take(self, message: str | bytes) -> None:
        """Process one event; ``RequestFailure`` if it is unreadable or reports an error."""
        try:
            event = json.loads(message)
            match event["type"]:
                case "response.output_text.delta" | "response.output_audio_transcript.delta":
                    self._record.text()
                    self.text += str(event["delta"])
                case "response.output_audio.delta":
                    self._record.audio(_pcm_seconds(event["delta"], event.get("rate")))
                case "error":
                    is_full = event["error"].get("code") == "queue_full"
                    raise RequestFailure("error event", error_text(event), is_rejection=is_full)
                case "response.done":
                    self._end(event["response"])
        except _UNREADABLE as error:
            raise _unreadable("event", error, message) from error

    def _end(self, response: Mapping[str, Any]) -> None:
        usage = response.get("usage") or {}
        cached = (usage.get("input_token_details") or {}).get("cached_tokens")
        self._record.usage(usage.get("input_tokens"), cached, usage.get("output_tokens"))
        if response["status"] not in ("completed", "incomplete"):  # incomplete: reached max_tokens
            raise RequestFailure("not completed", str(response["status"]))
        self.is_complete = True


def error_text(body: Any) -> str:
    """Return the message of an error, in OpenAI's format or another."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:500]


def _unreadable(what: str, error: Exception, content: str | bytes) -> RequestFailure:
    message = f"{type(error).__name__}: {error}; it was {content!r:.200}"
    return RequestFailure(f"unreadable {what}", message)


def _pcm_seconds(data: str, rate: int | None) -> float:
    try:
        return len(b64decode(data, validate=True)) / _SAMPLE_BYTES / (rate or _DEFAULT_RATE)
    except ValueError as error:
        raise ValueError(f"its sound is no base64: {error}") from error


def _count(value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise ValueError(f"a count of tokens is {value!r}")


_CHAT, _COMPLETIONS = "/chat/completions", "/completions"
_EVENTS, _JSON, _SOUND = "text/event-stream", "application/json", "audio/pcm"
_UNSUPPORTED = ("prompt_embeds", "encoder_prompt", "decoder_prompt")
_SOUND_FORMATS = {".mpeg": "mp3", **{f".{each}": each for each in ("wav", "mp3", "flac", "ogg")}}
_LIST_KEYS = {"image": "images", "audio": "audio", "video": "videos"}


@dataclass(frozen=True, slots=True)
class OpenAICall:
    """A request to post, and the reader of its answer.

    Attributes:
        body: httpx arguments: ``json``, or ``data`` and ``files``.
        answer_type: prefix of the answer's content type.
    """

    path: str
    body: Mapping[str, Any]
    answer_type: str
    read: Callable[[httpx2.Response, MeasuredRequest], Awaitable[str]]


def openai_call(data: Mapping[str, Any], folder: Path, flags: BenchFlags, model: str) -> OpenAICall:
    """Convert a line to an API call.

    Args:
        data: a line of ``requests.jsonl``; for chats and completions also a line of OpenAI's
            batch format, with ``url`` and ``body``. Sampling fields without a stage go into the
            body; those of named stages go under ``stages``, an extension of this project's server.
        folder: folder of the files that the line names; they become part of the body.

    Raises:
        ValueError: the line is wrong, the API cannot express it, or a file does not exist.
    """
    if flags.is_text:
        return _streamed(data, folder, flags, model)
    line = parse_line(data)
    if flags.endpoint == "transcriptions":
        return _transcription(line, folder, model)
    fields = {"model": model, "input": _only_text(line, flags.endpoint)}
    if flags.endpoint == "embeddings":
        return OpenAICall("/embeddings", {"json": fields}, _JSON, read_document)
    fields["response_format"] = "pcm"  # the one whose bytes are its duration
    voice = flags.voice or line.speaker
    if voice is not None:
        fields["voice"] = voice
    return OpenAICall("/audio/speech", {"json": fields}, _SOUND, read_sound)


def realtime_events(data: Mapping[str, Any], flags: BenchFlags) -> list[Mapping[str, Any]]:
    """Create events that send a text over ``/v1/realtime``; ``ValueError`` for lines with more."""
    session: dict[str, Any] = {"type": "realtime", "output_modalities": ["text"]}
    if flags.speech:
        session["output_modalities"] = ["audio"]
        if flags.voice is not None:
            session["audio"] = {"output": {"voice": flags.voice}}
    said = {"type": "input_text", "text": _only_text(parse_line(data), flags.endpoint)}
    item = {"type": "message", "role": "user", "content": [said]}
    return [
        {"type": "session.update", "session": session},
        {"type": "conversation.item.create", "item": item},
        {"type": "response.create"},
    ]


def _only_text(line: RequestLine, endpoint: str | None) -> str:
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
    (wanted,) = line.audio
    fields = {"model": model, "response_format": "json"}
    if wanted.language is not None:
        fields["language"] = wanted.language
    file = folder / wanted.file
    form = {"data": fields, "files": {"file": (file.name, _content(file))}}
    path = "/audio/translations" if wanted.task == "translate" else "/audio/transcriptions"
    return OpenAICall(path, form, _JSON, read_document)


def _streamed(data: Mapping[str, Any], folder: Path, flags: BenchFlags, model: str) -> OpenAICall:
    path, given = _from_batch(data) if "body" in data else _from_line(parse_line(data), folder)
    fields: dict[str, Any] = {**given, "model": model, "stream": True}
    fields["stream_options"] = {"include_usage": True}
    if flags.speech:
        if path != _CHAT:
            raise ValueError("--speech takes lines with messages: completions are not spoken")
        fields.setdefault("modalities", ["text", "audio"])
    if "audio" in fields.get("modalities", ()):
        voice = {} if flags.voice is None else {"voice": flags.voice}
        fields["audio"] = {**voice, **fields.get("audio", {}), "format": "pcm16"}
    elif "audio" in fields:  # a voice is given, but the answer is text
        del fields["audio"]
    return OpenAICall(path, {"json": fields}, _EVENTS, read_events)


def _from_batch(data: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    path = str(data.get("url", "")).removeprefix("/v1")
    if path not in (_CHAT, _COMPLETIONS):
        raise ValueError(
            f"url: must be one of /v1{_CHAT}, /v1{_COMPLETIONS}, got {data.get('url')!r:.80}"
        )
    if not isinstance(data["body"], dict):
        raise ValueError(f"body: must be an object, got {data['body']!r:.80}")
    return path, data["body"]


def _from_line(line: RequestLine, folder: Path) -> tuple[str, Mapping[str, Any]]:
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
    """Convert messages, replacing each placeholder with the next of the line's files."""
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
        return _file_part(part.modality, url.url, folder)

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


_CHECK_TIMEOUT_S = 30.0
_KEEPALIVE_S = 2.0
"""Keep-alive of idle connections. The server may close them at any moment after longer."""


class HttpTarget:
    """A server, used in ``async with``, which checks that it can be reached.

    Args:
        flags: ``url``, with or without ``/v1``; ``model``, its name on the server; ``api_key``,
            sent as a bearer token, by default the first of ``$OMNI_API_KEY``.

    Attributes:
        model: the requested model, or, after entering, the server's only one.

    Raises:
        ValueError: the URL is invalid, or flags conflict; and on entering: the server cannot be
            reached, refuses the key, or does not have the model. The message names the flag.
    """

    answering_stage: str | None = None

    def __init__(self, flags: BenchFlags) -> None:
        self._flags = flags
        self.base_url = _base_url(flags.url or "")
        if flags.voice is not None and not flags.speech and flags.endpoint != "speech":
            raise ValueError("--voice goes together with --speech, or with --endpoint speech")
        if flags.speech and flags.endpoint not in (None, "chat", "realtime"):
            raise ValueError(f"--speech is about chats and realtime, not about {flags.endpoint}")
        self.model = flags.model or ""
        key = flags.api_key or os.environ.get("OMNI_API_KEY", "").split(",")[0].strip() or None
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._client = httpx2.AsyncClient(
            headers=self._headers,
            # Unlimited connections: a limit of the client would be measured as the server's.
            limits=httpx2.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEPALIVE_S
            ),
            timeout=None,
        )

    async def __aenter__(self) -> Self:
        try:
            self.model = await self._find_model()
        except BaseException:
            await self._client.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    def prepare(self, line: Mapping[str, Any], folder: Path) -> Send:
        """Prepare a request; see :class:`~omni.commands.bench.load.LoadTarget`."""
        if self._flags.endpoint == "realtime":
            events = [json.dumps(event) for event in realtime_events(line, self._flags)]
            return partial(self._send_realtime, events)
        call = openai_call(line, folder, self._flags, self.model)
        url, headers = self.base_url + call.path, {"accept": call.answer_type}
        request = self._client.build_request("POST", url, headers=headers, **call.body)
        request.read()  # buffers multipart forms, so that they can be sent again
        return partial(self._send, request, call)

    async def reset_caches(self) -> None:
        """Do nothing: the API cannot. Synthetic requests of different levels share no prefix."""

    async def _send(
        self, request: httpx2.Request, call: OpenAICall, record: MeasuredRequest
    ) -> str:
        """Send a request and read its answer; a wrong content type or a broken one is a failure."""
        record.send()
        try:
            response = await self._client.send(request, stream=True)
            try:
                if response.status_code != HTTPStatus.OK:
                    raise _status_failure(response.status_code, await response.aread())
                kind = response.headers.get("content-type", "")
                if not kind.startswith(call.answer_type):
                    is_stream = call.answer_type == _EVENTS
                    expected = "not streamed" if is_stream else f"not {call.answer_type}"
                    raise RequestFailure("no stream", f"the answer is {kind!r:.80}, {expected}")
                return await call.read(response, record)
            finally:
                await response.aclose()
        except httpx2.ConnectError as error:
            raise RequestFailure("no connection", _message(error)) from error
        except httpx2.TimeoutException as error:
            raise RequestFailure("timeout", _message(error)) from error
        except (httpx2.TransportError, httpx2.StreamError) as error:
            raise RequestFailure("connection broke", _message(error)) from error

    async def _send_realtime(self, events: Sequence[str], record: MeasuredRequest) -> str:
        """Send a text over a WebSocket; connecting is part of the measured time, as over HTTP."""
        base = "ws" + self.base_url.removeprefix("http")
        url = f"{base}/realtime?{urlencode({'model': self.model})}"
        answer = RealtimeEvents(record)
        record.send()
        try:
            async with connect(
                url, additional_headers=self._headers, max_size=_MAX_BYTES, proxy=None
            ) as connection:
                for event in events:
                    await connection.send(event)
                async for message in connection:
                    answer.take(message)
                    if answer.is_complete:
                        return answer.text
        except InvalidStatus as error:
            status = error.response.status_code
            raise _status_failure(status, bytes(error.response.body or b"")) from error
        except (OSError, WebSocketException) as error:
            raise RequestFailure("connection broke", _message(error)) from error
        raise RequestFailure("cut off", "the connection was closed before the answer was complete")

    async def _find_model(self) -> str:
        wanted, url = self._flags.model, self._flags.url
        try:
            response = await self._client.get(
                f"{self.base_url}/models",
                timeout=_CHECK_TIMEOUT_S,
                # Servers close connections after an error; the first request must not reuse one.
                headers={"connection": "close"},
            )
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ValueError(f"--url {url}: cannot be reached: {_message(error)}") from error
        if response.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise ValueError(
                f"--url {url}: refuses the key; see --api-key: {_body_text(response.content)}"
            )
        names = _names(response)
        if names is None:
            if wanted is None:
                raise ValueError(
                    f"--url {url}: does not list its models (status {response.status_code} for "
                    f"{self.base_url}/models); name one with --model"
                )
            return wanted
        known = ", ".join(names) or "none"
        if wanted is None:
            if len(names) != 1:
                raise ValueError(f"--model: the server has several or none, name one: {known}")
            return names[0]
        if wanted not in names:
            raise ValueError(f"--model: the server has no {wanted!r:.80}; it has {known}")
        return wanted


def _base_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment:
        raise ValueError(f"--url: must be such as http://localhost:8000, got {url!r:.200}")
    return f"{url.rstrip('/').removesuffix('/v1')}/v1"


def _names(response: httpx2.Response) -> list[str] | None:
    """Return the models listed in a response; None if it is no list."""
    if response.status_code != HTTPStatus.OK:
        return None
    try:
        return [str(each["id"]) for each in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return None


def _status_failure(status: int, content: bytes) -> RequestFailure:
    is_rejection = status == HTTPStatus.TOO_MANY_REQUESTS
    return RequestFailure(f"status {status}", _body_text(content), is_rejection=is_rejection)


def _body_text(content: bytes) -> str:
    try:
        return error_text(json.loads(content))
    except (ValueError, RecursionError):
        return content[:200].decode("utf-8", "replace") or "(an empty answer)"


def _message(error: Exception) -> str:
    return str(error) or type(error).__name__
