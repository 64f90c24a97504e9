"""Lines of ``requests.jsonl``: their fields, and conversion to prompts and sampling parameters.

Errors of invalid lines show an example of a valid one. The files that a request names are looked up
through :class:`RequestFiles`: in a folder, or elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, TypeAlias
from urllib.parse import urlsplit
from urllib.request import url2pathname

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from engine import (
    AudioPrompt,
    AudioTask,
    ChatPrompt,
    DecoderPrompt,
    EmbedsPrompt,
    EncoderPrompt,
    ExplicitEncoderDecoderPrompt,
    ImagePrompt,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
    TranscriptionOptions,
    VideoPrompt,
)
from engine.interface.placed_error import KeyPath, PlacedError, suggest
from engine.interface.settings import explain_validation_error
from engine.media.media_source import regular_file

if TYPE_CHECKING:
    from torch import Tensor

_TEXT = "Once upon a time"
_QUESTION: Mapping[str, Any] = {"type": "text", "text": "What is this?"}
_IMAGE: Mapping[str, Any] = {"type": "image_url", "image_url": {"url": "photo.png"}}
_FORMS: Mapping[str, Mapping[str, Any]] = {
    "prompt_token_ids": {"prompt_token_ids": [1, 2, 3]},
    "prompt_embeds": {"prompt_embeds": "rows.safetensors"},
    "encoder_prompt": {"encoder_prompt": "The door was open."},
    "decoder_prompt": {"encoder_prompt": "The door was open.", "decoder_prompt": "It"},
    "audio": {"audio": ["question.wav"]},
    "images": {"images": ["photo.png"], "decoder_prompt": "What is this?"},
}
_EXAMPLE_FIELDS: Mapping[str, Any] = {
    "request_id": "first",
    "sampling": {"max_tokens": 16},
    "priority": 0,
    "cache_salt": "mine",
    "speaker": "Ethan",
}


def example_line(data: Mapping[str, Any]) -> str:
    """Format an example of the kind of line that the user seems to have meant."""
    line = dict(_form(data))
    line |= {key: value for key, value in _EXAMPLE_FIELDS.items() if key in data}
    # Those that were written at the top level, by their valid names.
    sampling = {
        SAMPLING_KEYS[key]: value
        for key, value in data.items()
        if key in SAMPLING_KEYS and isinstance(value, int | float)
    }
    return json.dumps(line | ({"sampling": sampling} if sampling else {}))


def _form(data: Mapping[str, Any]) -> Mapping[str, Any]:
    prompt = data.get("messages", data.get("prompt"))
    if prompt is None:
        forms = (form for key, form in _FORMS.items() if key in data)
        return next(forms, {"prompt": _TEXT})
    types = _types_of_parts(prompt)
    if types & {"audio", "input_audio"} or "audio" in data:
        return {"messages": _chat([{"type": "audio"}, _QUESTION]), "audio": ["question.wav"]}
    if types & {"image", "image_url"} or "images" in data:
        return {"messages": _chat([_IMAGE, _QUESTION])}
    if types:
        return {"messages": _chat([_QUESTION])}
    if "messages" in data or isinstance(prompt, list | dict):
        return {"messages": _chat("Why is the sky blue?")}
    return {"prompt": _TEXT}


def _chat(content: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def _types_of_parts(prompt: object) -> set[str]:
    """Return the types of the parts of messages, as far as they can be read."""
    messages = prompt if isinstance(prompt, list) else [prompt]
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return {str(part.get("type")) for part in parts if isinstance(part, dict)}


def prompt_of(line: RequestLine, files: RequestFiles) -> Prompt:
    """Create a line's prompt. Missing files are reported now; the engine checks their contents.

    Raises:
        ValueError: a file does not exist, is no regular file, or contains no embeddings.
    """
    encoder = _encoder_prompt(line, files)
    if encoder is None:
        return _with_items(_prompt_of_form(line, files), line, files)
    if line.decoder_prompt is None:
        return ExplicitEncoderDecoderPrompt(encoder)
    return ExplicitEncoderDecoderPrompt(encoder, _side(line.decoder_prompt, files))


def _encoder_prompt(line: RequestLine, files: RequestFiles) -> EncoderPrompt | None:
    """Return the line's prompt for an encoder, if it has one."""
    if line.encoder_prompt is not None:
        return _side(line.encoder_prompt, files)
    if line.shows_items:
        return None
    if line.audio is not None:
        (entry,) = line.audio
        wishes = {key: getattr(entry, key) for key in entry.wishes}
        return AudioPrompt(files.item("audio", entry.file), **wishes)
    if line.images is not None:
        (image,) = line.images
        return ImagePrompt(files.item("images", image))
    return None


def _with_items(form: DecoderPrompt, line: RequestLine, files: RequestFiles) -> DecoderPrompt:
    """Attach the line's images, audio and videos to a prompt, if there are any."""
    if not isinstance(form, TextPrompt | ChatPrompt | TokensPrompt):
        return form
    shown: dict[str, list[Any]] = {
        "image": [files.item("images", image) for image in line.images or ()],
        "audio": [files.item("audio", entry.file) for entry in line.audio or ()],
        "video": [
            VideoPrompt(files.item("videos", entry.file), use_audio=entry.use_audio)
            for entry in line.videos or ()
        ],
    }
    if (messages := _messages(line)) is not None:
        shown = {key: [*_in_order(messages, key, each, files)] for key, each in shown.items()}
    return replace(form, multi_modal_data={key: items for key, items in shown.items() if items})


def _in_order(
    messages: tuple[ChatMessage, ...], modality: str, listed: list[Any], files: RequestFiles
) -> Iterator[Any]:
    """Yield items in the order of their parts, from the parts themselves and the line's list."""
    rest = iter(listed)
    contents = (message.content for message in messages if not isinstance(message.content, str))
    for part in chain.from_iterable(contents):
        if part.modality != modality:
            continue
        at = part.image_url or part.video_url
        if at is not None:
            yield files.at_url(part.type, at.url)
        elif part.input_audio is not None:
            kind = part.input_audio.format.lower()
            yield f"data:audio/{kind};base64,{part.input_audio.data}"
        # The engine reports a part without an item in the list: it counts both.
        elif (item := next(rest, None)) is not None:
            yield item
    yield from rest


def _side(side: str | PromptForm, files: RequestFiles) -> DecoderPrompt:
    return TextPrompt(side) if isinstance(side, str) else _prompt_of_form(side, files)


def _prompt_of_form(line: RequestLine | PromptForm, files: RequestFiles) -> DecoderPrompt:
    if isinstance(line.prompt, str):
        return TextPrompt(line.prompt)
    messages = _messages(line)
    if messages is not None:
        return ChatPrompt(tuple(_template_message(message) for message in messages))
    if line.prompt_token_ids is not None:
        return TokensPrompt(line.prompt_token_ids)
    if line.prompt_embeds is None:
        raise ValueError("the line has no prompt")
    return EmbedsPrompt(files.embeds(line.prompt_embeds))


def _messages(line: RequestLine | PromptForm) -> tuple[ChatMessage, ...] | None:
    if line.messages is not None:
        return line.messages
    return None if isinstance(line.prompt, str) else line.prompt


def _template_message(message: ChatMessage) -> Mapping[str, Any]:
    """Convert a message for chat templates, without the contents of its media parts."""
    said = message.model_dump(exclude_none=True)
    if not isinstance(message.content, str):
        said["content"] = tuple(
            {"type": "text", "text": part.text} if part.type == "text" else {"type": part.modality}
            for part in message.content
        )
    return said


def sampling_of(
    given: Mapping[str, Any], own: Mapping[str, SamplingParams | None]
) -> dict[str, SamplingParams]:
    """Merge a line's sampling into the stages' own, field by field.

    Args:
        given: ``{stage: {field: value}}``, or ``{field: value}`` for every stage that samples, or
            both; fields of a stage take precedence. A key that is both a stage's name and a field
            is the stage if its value is a mapping.
        own: every stage's own parameters; None for a stage that does not sample.

    Raises:
        ValueError: an unknown stage or field, a stage that does not sample, or a wrong value.
    """
    fields = {key: value for key, value in given.items() if _is_field(key, value, own)}
    stages = {key: value for key, value in given.items() if key not in fields}
    sampled = [stage for stage, params in own.items() if params is not None]
    if fields and not sampled:
        raise ValueError(f"sampling.{next(iter(fields))}: no stage of this pipeline samples")
    for stage, value in stages.items():
        if stage not in own:
            raise ValueError(f"sampling.{stage}: unknown stage{suggest(stage, own)}")
        if not isinstance(value, Mapping):
            shown = repr(value)[:80]
            raise ValueError(f"sampling.{stage}: should be a mapping of its fields, got {shown}")
        if own[stage] is None and value.keys() != {"truncate_prompt_tokens"}:
            raise ValueError(f"sampling.{stage}: this stage does not sample; leave it out")
    merged = {}
    for stage in sampled if fields else stages:
        for_it = stages.get(stage, {})
        # An error in the fields for all stages is reported without the name of a stage.
        within = ("sampling", stage) if for_it or not fields else ("sampling",)
        merged[stage] = merged_sampling(own[stage], fields | dict(for_it), within)
    return merged


def _is_field(key: str, value: object, own: Mapping[str, object]) -> bool:
    if key in own:
        # A stage may be called "seed".
        return key in SamplingParams.model_fields and not isinstance(value, Mapping)
    return key in SamplingParams.model_fields or not isinstance(value, Mapping)


def merged_sampling(
    own: SamplingParams | None, changes: Mapping[str, Any], within: KeyPath = ()
) -> SamplingParams:
    """Merge fields into a stage's own parameters; ``ValueError`` names a wrong one and its path."""
    params = own or SamplingParams(max_tokens=0)
    changed = params.model_dump(mode="json") | dict(changes)
    try:
        return SamplingParams.model_validate_json(json.dumps(changed), strict=True)
    except ValidationError as error:
        message = explain_validation_error(error, SamplingParams, changed, within=within)
        raise ValueError(message.replace("\n", "; ")) from error


FORMS = ("prompt", "messages", "prompt_token_ids", "prompt_embeds")
ENCODER_KEYS = ("encoder_prompt", "audio", "images")
ITEM_KEYS = ("audio", "images", "videos")
FORMS_WITH_ITEMS = ("prompt", "messages", "prompt_token_ids")
SAMPLING_KEYS: Mapping[str, str] = {
    **{name: name for name in SamplingParams.model_fields},
    "max_completion_tokens": "max_tokens",
}
"""Fields of ``sampling``, by the names that other APIs have for them at the top level."""
KEYS_OF_FILES = ("image", "images", "audio", "audio_url", "video", "path", "url", "file")
"""Keys of a part's file in other APIs."""


def text_or(other: str, kinds: tuple[type, ...], wanted: str) -> Discriminator:
    """Discriminate between text and another form; other values give an error with ``wanted``."""

    def choose(value: Any) -> str | None:
        if isinstance(value, str):
            return "text"
        return other if isinstance(value, kinds) else None

    # Pydantic's own message would mention tags, which are internal.
    return Discriminator(
        choose, custom_error_type="neither_form", custom_error_message=f"Input should be {wanted}"
    )


_MAPPING = (dict, BaseModel)


def _or_text(model: type[BaseModel], key: str, wanted: str) -> BeforeValidator:
    """Take a text as the ``key`` of a mapping; other values give an error with ``wanted``."""

    def as_mapping(value: Any) -> Any:
        if isinstance(value, str):
            return {key: value}
        if isinstance(value, _MAPPING):
            return value
        raise PydanticCustomError("neither_form", "Input should be {wanted}", {"wanted": wanted})

    return BeforeValidator(as_mapping, Annotated[str, Field(min_length=1)] | model)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    def _given(self, *keys: str) -> list[str]:
        return [key for key in keys if getattr(self, key) is not None]


class MediaUrl(_Strict):
    """The location of an image or a video, as in OpenAI's requests.

    Attributes:
        url: a file, or its content as a data URL (``data:image/png;base64,...``).
        detail: accepted and ignored: the checkpoint's processor decides the size.
    """

    url: str = Field(min_length=1)
    detail: str | None = None


_WANTED_URL = "a file, or a mapping that has it as 'url'"
_WANTED_FILE = "the name of a file, or a mapping that has one as 'file'"


class InputAudio(_Strict):
    """Inline audio, as in OpenAI's requests.

    Attributes:
        data: the content of an audio file, in base64.
        format: format of the file: ``wav``, ``mp3``, ...
    """

    data: str = Field(min_length=1)
    format: str = Field(pattern="^[A-Za-z0-9]{1,16}$")


_CONTENT_TYPES = ("text", "image_url", "input_audio", "video_url")
"""Types of parts with content, in a field of the same name; other types have none."""


class ContentPart(_Strict):
    """A part of a message.

    Attributes:
        type: ``text``; ``image``, ``audio`` or ``video``: the next item of the line's list, for
            which the chat template inserts a placeholder; or ``image_url``, ``input_audio`` or
            ``video_url``, which contain their item.
    """

    unknown_key_hints: ClassVar[Mapping[str, str]] = dict.fromkeys(
        KEYS_OF_FILES,
        "files go into the request's 'images', 'audio' and 'videos' lists, in the order of their "
        "parts",
    )

    type: Literal["text", "image", "audio", "video", "image_url", "input_audio", "video_url"]
    text: str | None = None
    image_url: Annotated[MediaUrl, _or_text(MediaUrl, "url", _WANTED_URL)] | None = None
    input_audio: InputAudio | None = None
    video_url: Annotated[MediaUrl, _or_text(MediaUrl, "url", _WANTED_URL)] | None = None

    @property
    def modality(self) -> str:
        """Name of the type in chat templates, wherever the content is."""
        return self.type.removeprefix("input_").removesuffix("_url")

    @model_validator(mode="after")
    def _check_content(self) -> ContentPart:
        for key in _CONTENT_TYPES:
            if (key == self.type) != (getattr(self, key) is not None):
                article = "an" if key[0] in "aeiou" else "a"
                raise ValueError(f"a part of type {key} has {article} {key}, and no other part has")
        return self


class ChatMessage(_Strict):
    """One turn of a conversation.

    Attributes:
        role: ``system``, ``user``, ``assistant`` or another role of the chat template.
        content: text, or parts in order.
        name: name of the speaker, for templates that use it.
    """

    role: str
    name: str | None = None
    content: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[tuple[ContentPart, ...], Field(fail_fast=True), Tag("list")],
        text_or("list", (list, tuple), "text or a list of parts"),
    ]


Messages: TypeAlias = Annotated[tuple[ChatMessage, ...], Field(min_length=1, fail_fast=True)]


class AudioFile(_Strict):
    """A file of speech, with transcription settings; see :class:`engine.AudioPrompt`.

    Attributes:
        file: WAV, FLAC, OGG or MP3.
        language: language of the speech.
        task: transcribe, or translate to English.
        timestamps: if true, the answer contains timestamps.
        vad: if true, only speech is transcribed (voice activity detection).
        transcription: options of a speech model; see :class:`engine.TranscriptionOptions`.
    """

    file: str = Field(min_length=1)
    language: str | None = Field(default=None, min_length=1)
    task: AudioTask | None = None
    timestamps: bool | None = None
    vad: bool | None = None
    transcription: TranscriptionOptions | None = None

    @property
    def wishes(self) -> list[str]:
        """Keys of the settings for a speech model that are given."""
        return self._given("language", "task", "timestamps", "vad", "transcription")


class VideoFile(_Strict):
    """A file of video; see :class:`engine.VideoPrompt`.

    Attributes:
        file: mp4 or webm.
        use_audio: if true, its audio track is used too, interleaved with its frames.
    """

    file: str = Field(min_length=1)
    use_audio: bool = True


class _Forms(_Strict):
    """The forms of a prompt that every model accepts.

    Attributes:
        prompt: text, or chat messages for the checkpoint's chat template.
        messages: chat messages; another name for the same.
        prompt_token_ids: token ids, used unchanged.
        prompt_embeds: a safetensors file with one tensor ``(tokens, hidden)``.
    """

    prompt: (
        Annotated[
            Annotated[str, Tag("text")] | Annotated[Messages, Tag("list")],
            text_or("list", (list, tuple), "text or a list of chat messages"),
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


OneSide: TypeAlias = Annotated[
    Annotated[str, Tag("text")] | Annotated[PromptForm, Tag("mapping")],
    text_or("mapping", _MAPPING, f"a prompt: text, or a mapping with one of {', '.join(FORMS)}"),
]
OneAudio: TypeAlias = Annotated[AudioFile, _or_text(AudioFile, "file", _WANTED_FILE)]
OneVideo: TypeAlias = Annotated[VideoFile, _or_text(VideoFile, "file", _WANTED_FILE)]


class RequestLine(_Forms):
    """One request, with exactly one kind of prompt.

    Attributes:
        request_id: unique in the file; generated if absent.
        encoder_prompt: for encoder-decoder models: text, or a mapping with one of the forms above.
        audio: with a prompt of text, messages or token ids: audio files, one for each placeholder
            in it. Otherwise one file, for the encoder of a speech model, or as a user's message to
            a decoder that accepts audio.
        images: likewise: image files, or one for the encoder of a vision model.
        videos: with such a prompt: video files.
        decoder_prompt: with ``encoder_prompt``, ``audio`` or ``images``: start of the decoder's
            text, in the same forms as ``encoder_prompt``. Absent means the model's default.
        sampling: fields of ``SamplingParams``: for one stage under its name, or, without one, for
            every stage that samples.
        priority: lower runs earlier.
        cache_salt: only requests with the same salt share cached blocks.
        speaker: the voice, in a pipeline that speaks.
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
        """True if audio and images are part of a decoder's prompt, not an encoder's input."""
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
            if entry.wishes:
                raise PlacedError(
                    ("audio", index, entry.wishes[0]),
                    "is for a speech model's encoder; beside a prompt, say in it what is wanted",
                )


def parse_line(data: Mapping[str, Any]) -> RequestLine:
    """Parse and validate a line of ``requests.jsonl``; ``ValueError`` describes any error."""
    try:
        return RequestLine.model_validate_json(json.dumps(dict(data)), strict=True)
    except ValidationError as error:
        explained = explain_validation_error(error, RequestLine, dict(data))
        raise ValueError(explained.replace("\n", "; ")) from error


def _check_one(keys: tuple[str, ...], given: list[str]) -> None:
    if len(given) != 1:
        raise ValueError(
            f"exactly one of {', '.join(keys)} must be given, got {' and '.join(given) or 'none'}"
        )


class RequestFiles(Protocol):
    """Finds the files that a request names. The engine checks their contents."""

    def item(self, key: str, name: str) -> str | Path | bytes:
        """Return an image, audio file or video; ``ValueError`` if there is no such file."""

    def at_url(self, key: str, url: str) -> str | Path | bytes:
        """Return the file at the URL of a message's part; ``ValueError`` if it is unavailable."""

    def embeds(self, name: str) -> Tensor:
        """Return a tensor ``(tokens, hidden)``; ``ValueError`` if it is unavailable."""


class FolderFiles:
    """Resolves names as paths relative to a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def item(self, key: str, name: str) -> str | Path:
        """Return a data URL unchanged, or the path of a file; see :class:`RequestFiles`."""
        return name if name[:5].lower() == "data:" else self._file(key, name)

    def _file(self, key: str, name: str) -> Path:
        file = self._folder / name
        return regular_file(file, f"{key}: {str(file)!r:.200}")

    def at_url(self, key: str, url: str) -> str | Path:
        """Return a data URL unchanged, or the path of a file."""
        scheme = url[:8].lower()
        if scheme.startswith(("http://", "https://")):
            raise ValueError(
                f"{key}: {url!r:.200} is in the network, and nothing is fetched from there; "
                "save it, and give the file"
            )
        if scheme.startswith("file:"):
            url = url2pathname(urlsplit(url).path)
        return self.item(key, url)

    def embeds(self, name: str) -> Tensor:
        """Load the only tensor of a file; the engine checks its width."""
        from safetensors import SafetensorError  # imported here: few requests need torch
        from safetensors.torch import load_file

        file = self._file("prompt_embeds", name)
        where = f"prompt_embeds: {str(file)!r:.200}"
        try:
            tensors = load_file(file)
        except (OSError, ValueError, SafetensorError) as error:
            raise ValueError(f"{where} cannot be read: {error}") from error
        return only_embeds(tensors, where)


def only_embeds(tensors: Mapping[str, Tensor], where: str) -> Tensor:
    """Return a file's only tensor, floating-point ``(tokens, hidden)``; else ``ValueError``."""
    if len(tensors) != 1:
        raise ValueError(
            f"{where} must hold one tensor, got {len(tensors)}: {', '.join(sorted(tensors))}"
        )
    (embeds,) = tensors.values()
    if embeds.ndim != 2 or not embeds.shape[0] or not embeds.is_floating_point():
        raise ValueError(
            f"{where} must hold a floating-point tensor (tokens, hidden), got "
            f"{str(embeds.dtype).removeprefix('torch.')} {tuple(embeds.shape)}"
        )
    return embeds
