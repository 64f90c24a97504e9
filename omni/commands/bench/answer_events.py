"""What the events of a streamed answer tell, in OpenAI's shapes."""

from __future__ import annotations

import binascii
import json
from base64 import b64decode
from collections.abc import Mapping
from typing import Any

from omni.commands.bench.measured_request import RequestFailure
from omni.commands.bench.request_timer import RequestTimer

__all__ = ["AnswerEvents", "error_text"]

_DONE = b"[DONE]"
_USUAL_RATE = 24_000
"""Samples per second of OpenAI's own pcm16, and of servers that do not say."""

_SAMPLE_BYTES = 2


class AnswerEvents:
    """Reads the events of one answer to a chat or to a request for completions.

    Args:
        timer: of the request; told what comes.

    Attributes:
        is_whole: whether the last event has come.
    """

    def __init__(self, timer: RequestTimer) -> None:
        self._timer = timer
        self._texts: list[str] = []
        # By completion, whether it has said why it ended.
        self._has_ended: dict[int, bool] = {}
        self.is_whole = False

    @property
    def may_end(self) -> bool:
        """Whether nothing is missing if no more comes: some servers leave out the last event."""
        return self.is_whole or (bool(self._has_ended) and all(self._has_ended.values()))

    @property
    def text(self) -> str:
        """Of the answer so far, of its first completion."""
        return "".join(self._texts)

    def take(self, data: bytes) -> None:
        """Read one event.

        Raises:
            RequestFailure: it is none that such an answer has, or tells of an error.
        """
        if data.strip() == _DONE:
            self.is_whole = True
            return
        try:
            event = json.loads(data)
            if not isinstance(event, dict):
                raise ValueError("it is no object")
            if event.get("error"):
                raise RequestFailure("error in the stream", error_text(event))
            for choice in event.get("choices") or ():
                self._take_choice(choice)
            if event.get("usage"):
                self._take_usage(event["usage"])
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise RequestFailure(
                "unreadable event", f"{type(error).__name__}: {error}; it was {data!r:.200}"
            ) from error

    def _take_choice(self, choice: Mapping[str, Any]) -> None:
        index = choice.get("index") or 0
        self._has_ended[index] = self._has_ended.get(index, False) or bool(
            choice.get("finish_reason")
        )
        delta = choice.get("delta") or {}
        # The second and third are what reasoning models' servers call what comes before.
        pieces = [choice.get("text"), delta.get("content")]
        thought = [delta.get("reasoning_content"), delta.get("reasoning")]
        text = "".join(piece for piece in pieces if piece)
        if text or any(thought):
            self._timer.text()
        if text and not index:
            self._texts.append(text)
        audio = delta.get("audio") or {}
        if audio.get("data"):
            try:
                num_bytes = len(b64decode(audio["data"], validate=True))
            except binascii.Error as error:
                raise ValueError(f"its sound is no base64: {error}") from error
            rate = audio.get("sampling_rate") or _USUAL_RATE
            self._timer.audio(num_bytes / _SAMPLE_BYTES / rate)

    def _take_usage(self, usage: Mapping[str, Any]) -> None:
        details = usage.get("prompt_tokens_details") or {}
        self._timer.usage(
            _count(usage.get("prompt_tokens")),
            _count(details.get("cached_tokens")),
            _count(usage.get("completion_tokens")),
        )


def error_text(body: Any) -> str:
    """What an error in OpenAI's shape says, or one in another."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:500]


def _count(value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise ValueError(f"a count of tokens is {value!r}")
