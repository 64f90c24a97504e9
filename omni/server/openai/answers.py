"""Answers in OpenAI's shapes; only the fields that are set are told."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

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
    "TokenLogprob",
    "TopLogprob",
    "Usage",
    "as_event",
    "as_json",
]


class PromptTokensDetails(BaseModel):
    """Tokens of a prompt that the cache saved computing."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of a prompt, and of all its completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(BaseModel):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token that was chosen."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Of the tokens of a message."""

    content: list[TokenLogprob]


class ChatAudio(BaseModel):
    """How an answer sounds, or what is new of it.

    ``data`` is base64: a file, or in a stream samples of 16 bits. ``sampling_rate`` is ours: it is
    the checkpoint's, and not always 24,000. Nothing is kept, so it has expired when it is told.
    """

    id: str
    data: str = ""
    transcript: str = ""
    expires_at: int = 0
    sampling_rate: int = 0


class ChatMessageAnswer(BaseModel):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str | None
    audio: ChatAudio | None = None


class ChatChoice(BaseModel):
    """One completion of a chat."""

    index: int
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatAnswer(BaseModel):
    """The answer to a chat."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(BaseModel):
    """What is new of what the assistant says."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    audio: ChatAudio | None = None


class ChatChunkChoice(BaseModel):
    """What is new of one completion."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatChunk(BaseModel):
    """A piece of a streamed answer to a chat."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionLogprobs(BaseModel):
    """Of the tokens of a completion; ``text_offset`` counts characters of its text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One completion of one prompt, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class CompletionAnswer(BaseModel):
    """Completions of one or several prompts, or what is new of them."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


def as_json(answer: BaseModel) -> bytes:
    """Write an answer."""
    return answer.model_dump_json(exclude_unset=True).encode()


def as_event(answer: BaseModel) -> bytes:
    """Write an answer as a server-sent event."""
    return b"data: " + as_json(answer) + b"\n\n"
