"""A request over HTTP, and how its answer is read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from omni.commands.bench.answer_events import AnswerEvents
from omni.commands.bench.event_lines import EventLines
from omni.commands.bench.measured_request import RequestFailure
from omni.commands.bench.request_timer import RequestTimer
from omni.commands.bench.wav_pieces import WavPieces

__all__ = ["HttpCall", "Reader", "read_document", "read_events", "read_sound"]

Reader: TypeAlias = Callable[[AsyncIterator[bytes], RequestTimer], Awaitable[str]]
"""Tells the timer what comes, and returns the text of the answer."""

_MOST_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class HttpCall:
    """What to post, and what is to come back.

    Attributes:
        path: behind ``/v1``.
        content: the body.
        content_type: of the body.
        answer_type: what the answer's type begins with.
        read: reads the answer's body.
    """

    path: str
    content: bytes
    content_type: str
    answer_type: str
    read: Reader

    @property
    def accept(self) -> str:
        """What the request says that it takes."""
        return f"{self.answer_type}*" if self.answer_type.endswith("/") else self.answer_type


async def read_events(chunks: AsyncIterator[bytes], timer: RequestTimer) -> str:
    """Read the server-sent events of a chat or of completions.

    Raises:
        RequestFailure: they are none, tell of an error, or end too early.
    """
    events, lines = AnswerEvents(timer), EventLines()
    async for chunk in chunks:
        try:
            for data in lines.feed(chunk):
                events.take(data)
        except ValueError as error:
            raise RequestFailure("unreadable event", str(error)) from error
    if not events.may_end:
        told = "the stream ended without [DONE], and before every completion said why it ended"
        raise RequestFailure("cut off", told)
    return events.text


async def read_sound(chunks: AsyncIterator[bytes], timer: RequestTimer) -> str:
    """Read a WAV file as it is made.

    Raises:
        RequestFailure: it is none, or has no sound.
    """
    pieces = WavPieces()
    async for chunk in chunks:
        try:
            seconds = pieces.feed(chunk)
        except ValueError as error:
            raise RequestFailure("unreadable sound", str(error)) from error
        if seconds:
            timer.audio(seconds)
    if not pieces.has_sound:
        raise RequestFailure("no sound", "the answer is a WAV file without samples")
    return ""


async def read_document(chunks: AsyncIterator[bytes], timer: RequestTimer) -> str:
    """Read one document of JSON: embeddings, or a transcription.

    Raises:
        RequestFailure: it is none, or is neither of these.
    """
    content = bytearray()
    async for chunk in chunks:
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
        timer.usage(prompt if isinstance(prompt, int) else None, None, None)
        return str(answer.get("text", ""))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        told = f"{type(error).__name__}: {error}; it was {bytes(content)!r:.200}"
        raise RequestFailure("unreadable answer", told) from error
