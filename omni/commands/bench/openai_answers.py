"""Answers of a server with OpenAI's API, recorded while they arrive."""

from __future__ import annotations

import binascii
import json
from base64 import b64decode
from collections.abc import Mapping
from typing import Any

import httpx2

from omni.commands.bench.measured_request import MeasuredRequest, RequestFailure

__all__ = [
    "AnswerEvents",
    "RealtimeEvents",
    "error_text",
    "read_document",
    "read_events",
    "read_sound",
]

_DONE = "[DONE]"
_USUAL_RATE = 24_000
"""Samples per second of OpenAI's own pcm16, and of servers that do not say."""

_SAMPLE_BYTES = 2
_MOST_BYTES = 64 * 2**20
"""Of an event, or of a document."""

_LONGEST_WAV_HEADER = 1 << 16
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


async def read_events(response: httpx2.Response, record: MeasuredRequest) -> str:
    """Read the server-sent events of a chat or of completions, and return the text.

    Raises:
        RequestFailure: one cannot be read or is an error, or the stream ends too early.
    """
    events = AnswerEvents(record)
    try:
        async for event in httpx2.EventSource(response, max_event_size=_MOST_BYTES):
            if event.data:
                events.take(event.data)
    except httpx2.SSEError as error:
        raise RequestFailure("unreadable event", str(error)) from error
    if not events.may_end:
        message = "the stream ended without [DONE], and before every completion said why it ended"
        raise RequestFailure("cut off", message)
    return events.text


async def read_sound(response: httpx2.Response, record: MeasuredRequest) -> str:
    """Read a WAV file as it is generated; its header states a length that means nothing.

    Raises:
        RequestFailure: it is no WAV file, or has no samples.
    """
    head, bytes_per_s = b"", 0
    async for chunk in response.aiter_bytes():
        if not bytes_per_s:
            head += chunk
            bytes_per_s, start = _wav_format(head)
            chunk = head[start:]
        if chunk and bytes_per_s:
            record.audio(len(chunk) / bytes_per_s)
    if not record.audio_s:
        raise RequestFailure("no sound", "the answer is a WAV file without samples")
    return ""


def _wav_format(head: bytes) -> tuple[int, int]:
    """Bytes per second of a WAV file, and where they begin; zeros if the header is incomplete."""
    if head[:4] != b"RIFF"[: len(head)] or head[8:12] != b"WAVE"[: max(0, len(head) - 8)]:
        raise RequestFailure("unreadable sound", f"it is no WAV file, it begins with {head[:16]!r}")
    place, bytes_per_s = 12, 0
    while len(head) >= place + 8:
        name, size = head[place : place + 4], int.from_bytes(head[place + 4 : place + 8], "little")
        place += 8
        if name == b"data":
            if not bytes_per_s:
                raise RequestFailure("unreadable sound", "its samples come before their format")
            return bytes_per_s, place
        if name == b"fmt " and len(head) >= place + 12:
            bytes_per_s = int.from_bytes(head[place + 8 : place + 12], "little")
        place += size + size % 2
    if len(head) > _LONGEST_WAV_HEADER:
        message = f"it has no samples in its first {_LONGEST_WAV_HEADER} bytes"
        raise RequestFailure("unreadable sound", message)
    return 0, 0


async def read_document(response: httpx2.Response, record: MeasuredRequest) -> str:
    """Read one JSON document: embeddings, or a transcription, whose text is returned.

    Raises:
        RequestFailure: it is neither of these.
    """
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > _MOST_BYTES:
            raise RequestFailure("unreadable answer", f"it is longer than {_MOST_BYTES:,} bytes")
    try:
        answer: Any = json.loads(content)
        usage = answer.get("usage") or {}
        if "text" not in answer and not answer["data"][0]["embedding"]:
            raise ValueError("it has neither a text nor an embedding")
        # Usages of transcriptions may count seconds instead.
        prompt = usage.get("prompt_tokens")
        record.usage(prompt if isinstance(prompt, int) else None, None, None)
        return str(answer.get("text", ""))
    except _UNREADABLE as error:
        raise _unreadable("answer", error, bytes(content)) from error


class AnswerEvents:
    """Events of one answer to a chat or to a request for completions.

    Args:
        record: of the request.

    Attributes:
        is_complete: whether the last event has come.
        text: of the first completion, so far.
    """

    def __init__(self, record: MeasuredRequest) -> None:
        self._record = record
        self._has_ended: dict[int, bool] = {}  # by completion
        self.is_complete = False
        self.text = ""

    @property
    def may_end(self) -> bool:
        """Whether nothing is missing if no more comes: some servers leave out the last event."""
        return self.is_complete or (bool(self._has_ended) and all(self._has_ended.values()))

    def take(self, data: str) -> None:
        """Read one event.

        Raises:
            RequestFailure: it is none of such an answer, or reports an error.
        """
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
                self._take_choice(choice)
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

    def _take_choice(self, choice: Mapping[str, Any]) -> None:
        index = choice.get("index") or 0
        self._has_ended[index] = bool(self._has_ended.get(index) or choice.get("finish_reason"))
        delta = choice.get("delta") or {}
        text = (choice.get("text") or "") + (delta.get("content") or "")
        # Two names that servers have for the text of reasoning models before their answer.
        if text or delta.get("reasoning_content") or delta.get("reasoning"):
            self._record.text()
        if not index:
            self.text += text
        audio = delta.get("audio") or {}
        if audio.get("data"):
            self._record.audio(_pcm_seconds(audio["data"], audio.get("sampling_rate")))


class RealtimeEvents:
    """Events of one answer over ``/v1/realtime``.

    Args:
        record: of the request.

    Attributes:
        is_complete: whether the last event has come.
        text: so far.
    """

    def __init__(self, record: MeasuredRequest) -> None:
        self._record = record
        self.is_complete = False
        self.text = ""

    def take(self, message: str | bytes) -> None:
        """Read one event.

        Raises:
            RequestFailure: it is none of such an answer, or reports an error.
        """
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
        if response["status"] != "completed":
            raise RequestFailure("not completed", str(response["status"]))
        self.is_complete = True


def error_text(body: Any) -> str:
    """The message of an error in OpenAI's shape, or in another."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:500]


def _unreadable(what: str, error: Exception, content: str | bytes) -> RequestFailure:
    message = f"{type(error).__name__}: {error}; it was {content!r:.200}"
    return RequestFailure(f"unreadable {what}", message)


def _pcm_seconds(data: str, rate: int | None) -> float:
    try:
        return len(b64decode(data, validate=True)) / _SAMPLE_BYTES / (rate or _USUAL_RATE)
    except binascii.Error as error:
        raise ValueError(f"its sound is no base64: {error}") from error


def _count(value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise ValueError(f"a count of tokens is {value!r}")
