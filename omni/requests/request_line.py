"""What one line of ``requests.jsonl`` may say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from engine import AudioTask, SamplingParams
from engine.interface.placed_error import PlacedError

__all__ = [
    "SAMPLING_KEYS",
    "AudioFile",
    "ChatMessage",
    "ContentPart",
    "ImageUrl",
    "InputAudio",
    "PromptForm",
    "RequestLine",
    "VideoFile",
    "VideoUrl",
]

FORMS = ("prompt", "messages", "prompt_token_ids", "prompt_embeds")
ENCODER_KEYS = ("encoder_prompt", "audio", "images")
ITEM_KEYS = ("audio", "images", "videos")
FORMS_WITH_ITEMS = ("prompt", "messages", "prompt_token_ids")
SAMPLING_KEYS: Mapping[str, str] = {
    **{name: name for name in SamplingParams.model_fields},
    "max_completion_tokens": "max_tokens",
}
"""The fields of ``sampling``, by the keys that other programs have for them beside the prompt."""
KEYS_OF_FILES = ("image", "images", "audio", "audio_url", "video", "path", "url", "file")
"""Keys by which a part carries its file in other programs."""


def _text_or(other: str, kinds: tuple[type, ...], wanted: str) -> Discriminator:
    """Choose between text and another form; say what is wanted where a value has neither."""

    def choose(value: Any) -> str | None:
        if isinstance(value, str):
            return "text"
        return other if isinstance(value, kinds) else None

    # Pydantic's own message would speak of tags, which no user has seen.
    return Discriminator(
        choose, custom_error_type="neither_form", custom_error_message=f"Input should be {wanted}"
    )


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    def _given(self, *keys: str) -> list[str]:
        return [key for key in keys if getattr(self, key) is not None]


class ImageUrl(_Strict):
    """Where an image is, as in OpenAI's requests.

    Attributes:
        url: a file, or the image itself as a data URL (``data:image/png;base64,...``).
        detail: taken and not heeded: the checkpoint's processor decides on the size.
    """

    url: str = Field(min_length=1)
    detail: str | None = None


class VideoUrl(_Strict):
    """Where a video is.

    Attributes:
        url: a file, or the video itself as a data URL (``data:video/mp4;base64,...``).
    """

    url: str = Field(min_length=1)


class InputAudio(_Strict):
    """Sound itself, as in OpenAI's requests.

    Attributes:
        data: the content of a file of sound, in base64.
        format: of the file: ``wav``, ``mp3``, ...
    """

    data: str = Field(min_length=1)
    format: str = Field(pattern="^[A-Za-z0-9]{1,16}$")


_OF_TYPE = {name: name for name in ("text", "image_url", "input_audio", "video_url")}
"""What a part of a type carries; other types carry nothing."""


class ContentPart(_Strict):
    """A part of what is said.

    Attributes:
        type: ``text``; ``image``, ``audio`` or ``video``: the next of the line's, which the chat
            template puts a placeholder for; or ``image_url``, ``input_audio`` or ``video_url``,
            which bring their own.
        text: of a part that is text.
        image_url: of a part of that type.
        input_audio: of a part of that type.
        video_url: of a part of that type.
    """

    unknown_key_hints: ClassVar[Mapping[str, str]] = dict.fromkeys(
        KEYS_OF_FILES,
        "files go into the request's 'images', 'audio' and 'videos' lists, in the order of their "
        "parts",
    )

    type: Literal["text", "image", "audio", "video", "image_url", "input_audio", "video_url"]
    text: str | None = None
    image_url: (
        Annotated[
            Annotated[str, Field(min_length=1), Tag("text")] | Annotated[ImageUrl, Tag("mapping")],
            _text_or("mapping", (dict, BaseModel), "a file, or a mapping that has it as 'url'"),
        ]
        | None
    ) = None
    input_audio: InputAudio | None = None
    video_url: (
        Annotated[
            Annotated[str, Field(min_length=1), Tag("text")] | Annotated[VideoUrl, Tag("mapping")],
            _text_or("mapping", (dict, BaseModel), "a file, or a mapping that has it as 'url'"),
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def _carries_what_its_type_says(self) -> ContentPart:
        wanted = _OF_TYPE.get(self.type)
        for key in _OF_TYPE:
            if (key == wanted) != (getattr(self, key) is not None):
                article = "an" if key[0] in "aeiou" else "a"
                raise ValueError(f"a part of type {key} has {article} {key}, and no other part has")
        return self


class ChatMessage(_Strict):
    """One turn of a conversation.

    Attributes:
        role: who speaks: ``system``, ``user``, ``assistant`` or what the chat template knows.
        content: what is said: text, or parts in order.
        name: of the speaker, for templates that know it.
    """

    role: str
    name: str | None = None
    content: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[tuple[ContentPart, ...], Field(fail_fast=True), Tag("list")],
        _text_or("list", (list, tuple), "text or a list of parts"),
    ]


Messages: TypeAlias = Annotated[tuple[ChatMessage, ...], Field(min_length=1, fail_fast=True)]


class AudioFile(_Strict):
    """A file of speech, with what is wanted of it; see :class:`engine.AudioPrompt`.

    Attributes:
        file: WAV, FLAC, OGG or MP3.
        language: spoken in it.
        task: whether to write what is said, or the same in English.
        timestamps: whether to write when it is said.
    """

    file: str = Field(min_length=1)
    language: str | None = Field(default=None, min_length=1)
    task: AudioTask | None = None
    timestamps: bool | None = None

    @property
    def wishes(self) -> list[str]:
        """What is wanted of the speech model, by key."""
        return self._given("language", "task", "timestamps")


class VideoFile(_Strict):
    """A file of video; see :class:`engine.VideoPrompt`.

    Attributes:
        file: mp4 or webm.
        use_audio: whether its sound is heard, in step with what is seen.
    """

    file: str = Field(min_length=1)
    use_audio: bool = True


class _Forms(_Strict):
    """The forms of a prompt that every model knows.

    Attributes:
        prompt: text, or chat messages for the checkpoint's chat template.
        messages: chat messages; another name for the same.
        prompt_token_ids: token ids, used as they are.
        prompt_embeds: a safetensors file with one tensor ``(tokens, hidden)``.
    """

    prompt: (
        Annotated[
            Annotated[str, Tag("text")] | Annotated[Messages, Tag("list")],
            _text_or("list", (list, tuple), "text or a list of chat messages"),
        ]
        | None
    ) = None
    messages: Messages | None = None
    prompt_token_ids: (
        Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1, fail_fast=True)]
        | None
    ) = None
    prompt_embeds: str | None = Field(default=None, min_length=1)


class PromptForm(_Forms):
    """The prompt of one side of an encoder-decoder model, in exactly one form."""

    @model_validator(mode="after")
    def _exactly_one_form(self) -> PromptForm:
        _check_one(FORMS, self._given(*FORMS))
        return self


_MAPPING = (dict, BaseModel)
OneSide: TypeAlias = Annotated[
    Annotated[str, Tag("text")] | Annotated[PromptForm, Tag("mapping")],
    _text_or("mapping", _MAPPING, f"a prompt: text, or a mapping with one of {', '.join(FORMS)}"),
]
OneAudio: TypeAlias = Annotated[
    Annotated[str, Field(min_length=1), Tag("text")] | Annotated[AudioFile, Tag("mapping")],
    _text_or("mapping", _MAPPING, "the name of a file, or a mapping that has one as 'file'"),
]

OneVideo: TypeAlias = Annotated[
    Annotated[str, Field(min_length=1), Tag("text")] | Annotated[VideoFile, Tag("mapping")],
    _text_or("mapping", _MAPPING, "the name of a file, or a mapping that has one as 'file'"),
]


class RequestLine(_Forms):
    """One request, with exactly one kind of prompt.

    Attributes:
        request_id: unique in the file; made up when absent.
        encoder_prompt: of an encoder-decoder model: text, or a mapping with one of the forms above.
        audio: beside a prompt of text, messages or token ids: files of sound, one for each
            placeholder in it. Else one, for the encoder of a speech model, or as a user's
            message to a decoder that hears.
        images: likewise: image files, or one for the encoder of a vision model.
        videos: beside such a prompt: files of video.
        decoder_prompt: beside one of these three: what the decoder goes on from, in the same
            forms as ``encoder_prompt``. Absent means the model's default.
        sampling: fields of ``SamplingParams``: for one stage under its name, or, without one, for
            every stage that samples.
        priority: lower runs earlier.
        cache_salt: only requests with the same salt share cached blocks.
        speaker: whose voice, in a pipeline that speaks.
    """

    unknown_key_hints: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(SAMPLING_KEYS, "it belongs into 'sampling'"),
        "model": "leave it out: the pipeline says which models run",
        "stream": "leave it out: a file's outputs are written when they are finished",
    }

    request_id: str | None = Field(default=None, min_length=1)
    encoder_prompt: OneSide | None = None
    decoder_prompt: OneSide | None = None
    images: (
        Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(fail_fast=True)] | None
    ) = None
    audio: Annotated[tuple[OneAudio, ...], Field(fail_fast=True)] | None = None
    videos: Annotated[tuple[OneVideo, ...], Field(fail_fast=True)] | None = None
    sampling: dict[str, Any] = {}
    priority: int = 0
    cache_salt: str | None = None
    speaker: str | None = Field(default=None, min_length=1)

    @property
    def shows_items(self) -> bool:
        """Whether sound and images are part of a decoder's prompt, not an encoder's input."""
        return bool(self._given(*ITEM_KEYS)) and bool(self._given(*FORMS_WITH_ITEMS))

    @model_validator(mode="after")
    def _exactly_one_prompt(self) -> RequestLine:
        given = self._given(*FORMS)
        if self.videos is not None and not self._given(*FORMS_WITH_ITEMS):
            raise PlacedError(
                ("videos",), f"must stand beside one of {', '.join(FORMS_WITH_ITEMS)}"
            )
        encoder = self._given(*ENCODER_KEYS)
        if self.shows_items:
            encoder = [key for key in encoder if key not in ITEM_KEYS]
            self._check_sound()
        for key in ITEM_KEYS:
            files = getattr(self, key)
            if key not in encoder:
                continue
            if given:
                raise PlacedError(
                    (key,),
                    f"not supported yet beside {given[0]}; for an encoder-decoder model write "
                    "the text as decoder_prompt",
                )
            if len(files) != 1:
                raise PlacedError((key,), f"must be a list of exactly one file, got {len(files)}")
        if self.decoder_prompt is not None and not encoder:
            raise PlacedError(
                ("decoder_prompt",), f"must stand beside one of {', '.join(ENCODER_KEYS)}"
            )
        _check_one((*FORMS, *ENCODER_KEYS), given + encoder)
        return self

    def _check_sound(self) -> None:
        for index, entry in enumerate(self.audio or ()):
            if isinstance(entry, AudioFile) and entry.wishes:
                raise PlacedError(
                    ("audio", index, entry.wishes[0]),
                    "is for a speech model's encoder; beside a prompt, say in it what is wanted",
                )


def _check_one(keys: tuple[str, ...], given: list[str]) -> None:
    if len(given) != 1:
        raise ValueError(
            f"exactly one of {', '.join(keys)} must be given, got {' and '.join(given) or 'none'}"
        )
