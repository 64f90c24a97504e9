"""What one line of ``requests.jsonl`` may say."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from omni.config_error import PlacedError

__all__ = ["ChatMessage", "RequestLine"]

PROMPT_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds")
UNSUPPORTED_KEYS = ("encoder_prompt", "decoder_prompt", "images", "audio")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ChatMessage(_Strict):
    """One turn of a conversation.

    Attributes:
        role: who speaks: ``system``, ``user``, ``assistant`` or what the chat template knows.
        content: what is said.
    """

    role: str
    content: str


def _prompt_form(value: Any) -> str:
    return "text" if isinstance(value, str) else "messages"


class RequestLine(_Strict):
    """One request, with exactly one kind of prompt.

    Attributes:
        request_id: unique in the file; made up when absent.
        prompt: text, or chat messages for the checkpoint's chat template.
        prompt_token_ids: token ids, used as they are.
        prompt_embeds: a safetensors file with one tensor ``(tokens, hidden)``.
        encoder_prompt: not supported yet.
        decoder_prompt: not supported yet.
        images: not supported yet.
        audio: not supported yet.
        sampling: fields of ``SamplingParams`` by stage name.
        priority: lower runs earlier.
        cache_salt: only requests with the same salt share cached blocks.
    """

    request_id: str | None = Field(default=None, min_length=1)
    prompt: (
        Annotated[
            Annotated[str, Tag("text")]
            | Annotated[tuple[ChatMessage, ...], Field(min_length=1), Tag("messages")],
            Discriminator(_prompt_form),
        ]
        | None
    ) = None
    prompt_token_ids: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None, min_length=1
    )
    prompt_embeds: str | None = Field(default=None, min_length=1)
    encoder_prompt: Any = None
    decoder_prompt: Any = None
    images: Any = None
    audio: Any = None
    sampling: dict[str, dict[str, Any]] = {}
    priority: int = 0
    cache_salt: str | None = None

    @model_validator(mode="after")
    def _exactly_one_prompt(self) -> RequestLine:
        for key in UNSUPPORTED_KEYS:
            if getattr(self, key) is not None:
                raise PlacedError((key,), "not supported yet; no stage kind takes it")
        given = [key for key in PROMPT_KEYS if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(
                f"exactly one of {', '.join(PROMPT_KEYS)} must be given, "
                f"got {' and '.join(given) or 'none'}"
            )
        return self
