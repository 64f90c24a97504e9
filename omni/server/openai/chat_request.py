"""What a chat request may say."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from engine.interface.placed_error import PlacedError
from omni.server.openai.sampling_fields import SamplingFields
from omni.server.serving.request_body import ApiModel

__all__ = [
    "AudioWish",
    "ChatMessage",
    "ChatRequest",
    "ContentPart",
    "FileUrl",
    "ImageUrl",
    "InputAudio",
    "StreamOptions",
]


class FileUrl(ApiModel):
    """Where an image or a video is.

    Attributes:
        url: a data URL, or one of http where the server allows its host.
    """

    url: str = Field(min_length=1)


class ImageUrl(FileUrl):
    """Where an image is; how fine it is seen, is not chosen."""

    not_supported: ClassVar = {"detail": ("auto",)}


class InputAudio(ApiModel):
    """A sound.

    Attributes:
        data: a file in base64.
        format: which kind of file, for its reader to find out; it looks into the file.
    """

    data: str = Field(min_length=1)
    format: Literal["wav", "mp3", "flac", "ogg"]


class ContentPart(ApiModel):
    """A part of a message: the one of its fields that ``type`` names."""

    type: Literal["text", "image_url", "input_audio", "video_url"]
    text: str | None = None
    image_url: ImageUrl | None = None
    input_audio: InputAudio | None = None
    video_url: FileUrl | None = None

    @property
    def file_url(self) -> str | None:
        """Where the image or video is; None of a text or a sound."""
        at = self.image_url or self.video_url
        return None if at is None else at.url

    @model_validator(mode="after")
    def _has_what_it_names(self) -> ContentPart:
        for name in ("text", "image_url", "input_audio", "video_url"):
            given = getattr(self, name) is not None
            if given != (name == self.type):
                what = "missing; it must be given" if name == self.type else "does not belong here"
                raise PlacedError((name,), f"{what}: a part of type {self.type!r}")
        return self


def _form_of(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    return "list" if isinstance(value, (list, tuple)) else None


class ChatMessage(ApiModel):
    """One turn of a conversation; keys that answers have are taken where they are empty.

    How an earlier answer sounded is taken and left aside: its text is what was said.
    """

    without_effect: ClassVar = frozenset(("audio",))
    not_supported: ClassVar = dict.fromkeys(
        ("name", "refusal", "function_call", "tool_calls", "annotations"), ()
    )

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[list[ContentPart], Field(min_length=1), Tag("list")],
        Discriminator(
            _form_of,
            custom_error_type="neither_form",
            custom_error_message="Input should be text or a list of parts",
        ),
    ]

    @model_validator(mode="before")
    @classmethod
    def _says_what_it_sounded_like(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("audio") and data.get("content") is None:
            raise PlacedError(
                ("content",),
                "missing; this server keeps no sound, so give the transcript of the audio here",
            )
        return data


class StreamOptions(ApiModel):
    """What a stream reports beside the answer.

    Attributes:
        include_usage: whether its last chunk counts the tokens.
        continuous_usage_stats: whether every chunk counts those of its completion so far; as in
            vLLM, without effect unless ``include_usage`` is true.
    """

    not_supported: ClassVar = {"include_obfuscation": (False,)}

    include_usage: bool = False
    continuous_usage_stats: bool = False

    @property
    def counts_each_chunk(self) -> bool:
        """Whether chunks before the last one count tokens."""
        return self.include_usage and self.continuous_usage_stats


class AudioWish(ApiModel):
    """How an answer is to sound.

    Attributes:
        voice: a speaker of the pipeline; without one, its own choice.
        format: of the file, or of the pieces of a stream.
    """

    voice: str | None = Field(default=None, min_length=1)
    format: Literal["wav", "mp3", "flac", "pcm16"]


class ChatRequest(SamplingFields):
    """A chat request.

    Attributes:
        model: name of a pipeline.
        messages: oldest first.
        max_completion_tokens: of the answer; ``max_tokens`` is its older name.
        logprobs: whether to report them.
        top_logprobs: of how many tokens beside the chosen one.
        stream: whether to answer by server-sent events.
        stream_options: how.
        modalities: what to answer with; text always is.
        audio: how to sound; wanted with the modality ``audio``.
    """

    without_effect: ClassVar = frozenset(
        ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
    )
    not_supported: ClassVar = {
        "tools": (),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": (),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "prediction": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "web_search_options": (),
        "prompt_cache_retention": (),
    }

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    stream: bool = False
    stream_options: StreamOptions | None = None
    modalities: list[Literal["text", "audio"]] = Field(default=["text"], min_length=1)
    audio: AudioWish | None = None

    @model_validator(mode="after")
    def _fields_go_together(self) -> ChatRequest:
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise PlacedError(
                ("max_tokens",), "means the same as max_completion_tokens; give one of them"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise PlacedError(("top_logprobs",), "needs logprobs to be true")
        if self.stream_options is not None and not self.stream:
            raise PlacedError(("stream_options",), "needs stream to be true")
        if (self.audio is not None) != ("audio" in self.modalities):
            raise PlacedError(("audio",), 'goes together with "audio" among the modalities')
        if self.stream and self.audio is not None and self.audio.format != "pcm16":
            raise PlacedError(
                ("audio", "format"), f"a stream sounds as pcm16, got {self.audio.format!r}"
            )
        return self

    @property
    def sampling_names(self) -> dict[str, str]:
        """What fields of the sampling parameters are called here, where it is not the same."""
        is_new = self.max_completion_tokens is not None
        return {
            "max_tokens": "max_completion_tokens" if is_new else "max_tokens",
            "logprobs": "top_logprobs",
        }

    def sampling_fields(self) -> dict[str, Any]:
        """What is asked of the stage that answers."""
        fields = self.given_fields()
        limit = self.max_completion_tokens
        limit = self.max_tokens if limit is None else limit
        if limit is not None:
            fields["max_tokens"] = limit
        if self.logprobs:
            fields["logprobs"] = self.top_logprobs or 0
        return fields
