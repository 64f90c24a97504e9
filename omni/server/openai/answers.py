"""Answers in OpenAI's shapes; only the fields that are set are told.

Structs of msgspec, since one is made and written for every token that is streamed: they take a
tenth of the time of models that check their values, and all values here come from our own code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal
from uuid import uuid4

from msgspec import UNSET, Struct, UnsetType
from msgspec.json import Encoder

__all__ = [
    "ChatAnswer",
    "ChatAudio",
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatDelta",
    "ChatLogprobs",
    "ChatMessageAnswer",
    "CompletionAnswer",
    "CompletionChoice",
    "CompletionLogprobs",
    "PromptTokensDetails",
    "TextEvent",
    "TokenLogprob",
    "TopLogprob",
    "Usage",
    "as_event",
    "as_json",
]

_ENCODER = Encoder()

_BLANK = uuid4().hex
"""A text that stands in no answer."""


class PromptTokensDetails(Struct, kw_only=True):
    """Tokens of a prompt that the cache saved computing."""

    cached_tokens: int


class Usage(Struct, kw_only=True):
    """Tokens of a prompt, and of all its completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Struct, kw_only=True):
    """A token that could have been chosen; ``bytes`` is null where they cannot be told."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob, kw_only=True):
    """A token that was chosen."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, kw_only=True):
    """Of the tokens of a message."""

    content: list[TokenLogprob]


class ChatAudio(Struct, kw_only=True):
    """How an answer sounds, or what is new of it.

    ``data`` is written as base64: a file, or in a stream samples of 16 bits. ``sampling_rate`` is
    ours: it is the checkpoint's, and not always 24,000. Nothing is kept, so it has expired when it
    is told.
    """

    id: str
    data: bytes | UnsetType = UNSET
    transcript: str | UnsetType = UNSET
    expires_at: int | UnsetType = UNSET
    sampling_rate: int | UnsetType = UNSET


class ChatMessageAnswer(Struct, kw_only=True):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str | None
    audio: ChatAudio | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    """One completion of a chat."""

    index: int
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatAnswer(Struct, kw_only=True):
    """The answer to a chat."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(Struct, kw_only=True):
    """What is new of what the assistant says."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    audio: ChatAudio | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    """What is new of one completion."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatChunk(Struct, kw_only=True):
    """A piece of a streamed answer to a chat."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionLogprobs(Struct, kw_only=True):
    """Of the tokens of a completion; ``text_offset`` counts characters of its text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Struct, kw_only=True):
    """One completion of one prompt, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class CompletionAnswer(Struct, kw_only=True):
    """Completions of one or several prompts, or what is new of them."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


def as_json(answer: Struct) -> bytes:
    """Write an answer."""
    return _ENCODER.encode(answer)


def as_event(answer: Struct) -> bytes:
    """Write an answer as a server-sent event."""
    return b"data: " + _ENCODER.encode(answer) + b"\n\n"


class TextEvent:
    """Events that are alike but for a text: what is the same in all of them is written once.

    Most of what a stream tells is that: one for every token.

    Args:
        make: makes the answer of a text, which stands in it as it is, once or several times.
    """

    def __init__(self, make: Callable[[str], Struct]) -> None:
        self._parts = as_event(make(_BLANK)).split(_ENCODER.encode(_BLANK))

    def of(self, text: str) -> bytes:
        """The event of a text, as :func:`as_event` writes it."""
        return _ENCODER.encode(text).join(self._parts)
