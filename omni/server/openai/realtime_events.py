"""Events of a realtime session: client events, and server events under their beta names.

OpenAI renamed events and fields when the API left its beta. The server uses the newer names. It
also accepts the older names of session options, and sends older names to clients that request the
beta by a header.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from engine.interface.placed_error import PlacedError
from omni.server.openai.chat_request import ChatRequest, Voice
from omni.server.openai.responses import (
    FunctionChoice,
    FunctionToolParts,
    ReasoningOptions,
    to_chat_tools,
)
from omni.server.openai.tools import JsonObject
from omni.server.serving.api_error import ApiError
from omni.server.serving.request_body import ApiModel, Unsupported, check_part, parse_json

_Rate = Annotated[int, Field(ge=1000, le=384_000)]
_Milliseconds = Annotated[int, Field(ge=0, le=60_000)]
_PCM_RATE, _TELEPHONE_RATE = 24_000, 8_000
_TELEPHONE_TYPES = ("audio/pcmu", "audio/pcma")


class AudioFormat(ApiModel):
    """Audio format: 16-bit PCM, or the telephone codecs G.711 µ-law and A-law at 8,000 Hz."""

    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"] = "audio/pcm"
    rate: _Rate = _PCM_RATE

    @model_validator(mode="before")
    @classmethod
    def _fill_telephone_rate(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("type") not in _TELEPHONE_TYPES:
            return data
        if data.get("rate") not in (None, _TELEPHONE_RATE):
            message = f"{data['type']} has 8000 samples a second, got {data['rate']!r:.80}"
            raise PlacedError(("rate",), f"{message}; leave it out")
        return data | {"rate": _TELEPHONE_RATE}


class TurnDetection(ApiModel):
    """Detection of the end of a user's turn; ``none`` leaves it to ``commit``.

    ``semantic_vad`` works like ``server_vad``, with a silence duration set by its ``eagerness``.

    Audio is speech if its probability reaches ``threshold``. The end of speech starts a response
    if ``create_response``; its start cancels the active one if ``interrupt_response``.
    """

    not_supported: ClassVar = {"idle_timeout_ms": Unsupported("send response.create instead")}

    type: Literal["server_vad", "semantic_vad", "none"] = "server_vad"
    threshold: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    prefix_padding_ms: _Milliseconds = 300
    silence_duration_ms: _Milliseconds = 500
    create_response: bool = True
    interrupt_response: bool = True
    eagerness: Literal["low", "medium", "high", "auto"] = "auto"

    @property
    def silence_s(self) -> float:
        """Seconds of silence that end a turn."""
        waits = {"low": 1.0, "medium": 0.6, "high": 0.3, "auto": 0.6}
        is_semantic = self.type == "semantic_vad"
        return waits[self.eagerness] if is_semantic else self.silence_duration_ms / 1000


class InputTranscription(ApiModel):
    """Pipeline that transcribes the user's speech; an empty name disables transcription."""

    without_effect: ClassVar = frozenset(("delay", "keywords", "languages"))  # hints

    model: str = ""
    prompt: str | None = None
    language: str | None = Field(default=None, min_length=1)


class _AudioIn(ApiModel):
    without_effect: ClassVar = frozenset(("noise_reduction",))

    format: AudioFormat = AudioFormat()
    turn_detection: TurnDetection = TurnDetection(type="none")
    transcription: InputTranscription = InputTranscription()

    @model_validator(mode="before")
    @classmethod
    def _read_null_as_off(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        off: dict[str, dict[str, str]] = {"turn_detection": {"type": "none"}, "transcription": {}}
        return data | {key: off[key] for key in off.keys() & data.keys() if data[key] is None}


class _AudioOut(ApiModel):
    format: AudioFormat = AudioFormat()
    voice: Voice | None = None
    speed: float = Field(default=1.0, ge=0.25, le=1.5)


class _Audio(ApiModel):
    input: _AudioIn = _AudioIn()
    output: _AudioOut = _AudioOut()


_OLDER_FORMATS = {"pcm16": "audio/pcm", "g711_ulaw": "audio/pcmu", "g711_alaw": "audio/pcma"}
_OLDER_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "modalities": ("output_modalities",),
    "voice": ("audio", "output", "voice"),
    "speed": ("audio", "output", "speed"),
    "input_audio_format": ("audio", "input", "format"),
    "output_audio_format": ("audio", "output", "format"),
    "turn_detection": ("audio", "input", "turn_detection"),
    "input_audio_transcription": ("audio", "input", "transcription"),
    "input_audio_noise_reduction": ("audio", "input", "noise_reduction"),
    "max_response_output_tokens": ("max_output_tokens",),
}
"""Older names of options, with their current paths."""


class ResponseOptions(ApiModel):
    """Options of one response, or of every response of a session; absent ones keep their values.

    Attributes:
        instructions: system message before all items.
        output_modalities: ``text``, or ``audio`` with its transcript.
        max_output_tokens: limit of text tokens; ``inf`` uses the stage's own limit.
        stages: sampling parameters by stage, as in chat requests.
    """

    # Without truncation: a conversation that does not fit is refused.
    without_effect: ClassVar = frozenset(("tracing", "truncation"))
    not_supported: ClassVar = {
        "prompt": Unsupported("the server stores no prompts; send instructions"),
        "include": Unsupported("transcripts have no log-probabilities; leave it out"),
    }

    instructions: str | None = None
    output_modalities: (
        Annotated[list[Literal["text", "audio"]], Field(min_length=1, max_length=1)] | None
    ) = None
    audio: _Audio = _Audio()
    max_output_tokens: Annotated[int, Field(ge=1)] | Literal["inf"] | None = None
    temperature: float | None = None
    tools: list[FunctionToolParts] | None = None
    tool_choice: FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    stages: dict[str, dict[str, Any]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _rename_older_options(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        newer = {key: value for key, value in data.items() if key not in _OLDER_OPTIONS}
        for key in _OLDER_OPTIONS.keys() & data.keys():
            value = data[key]
            if key.endswith("audio_format"):
                if not isinstance(value, str) or value not in _OLDER_FORMATS:
                    known = ", ".join(_OLDER_FORMATS)
                    raise PlacedError((key,), f"should be one of {known}, got {value!r:.80}")
                value = {"type": _OLDER_FORMATS[value]}
            elif key == "modalities" and isinstance(value, list):
                value = ["audio"] if "audio" in value else value
            *path, name = _OLDER_OPTIONS[key]
            place = newer
            for step in path:
                inner = place.get(step)
                place[step] = place = dict(inner) if isinstance(inner, dict) else {}
            place[name] = value
        return newer

    def as_chat(self) -> ChatRequest:
        """Convert the options that concern the text to a chat request."""
        limit = self.max_output_tokens if isinstance(self.max_output_tokens, int) else None
        asked = {
            "model": "",
            "messages": [{"role": "user", "content": ""}],
            "max_completion_tokens": limit,
            "temperature": self.temperature,
            **to_chat_tools(self.tools, self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
        }
        return ChatRequest.model_validate(asked, strict=True)


SessionKind = Literal["realtime", "transcription"]


class SessionUpdate(ResponseOptions):
    """Options of a session; its model and type are set by the URL, and cannot be changed."""

    type: SessionKind | None = None
    model: str | None = None


class ItemPart(ApiModel):
    """A part of an item: text, audio in base64 in the session's format, or an image."""

    without_effect: ClassVar = frozenset(("transcript", "detail"))
    not_supported: ClassVar = {"file_id": Unsupported("the server stores no files; send a URL")}

    type: Literal["input_text", "input_audio", "input_image", "output_text"]
    text: str | None = None
    audio: str | None = Field(default=None, min_length=1)
    image_url: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_as_text(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if kind in ("output_audio", "audio"):
            return {"type": "output_text", "text": data.get("transcript")}
        return data | {"type": "output_text"} if kind == "text" else data

    @model_validator(mode="after")
    def _check_named_field(self) -> ItemPart:
        wanted = {"input_audio": "audio", "input_image": "image_url"}.get(self.type, "text")
        names = ("text", "audio", "image_url")
        check_part(self, names, wanted, f"a part of type {self.type!r}")
        if not (self.image_url or "data:").lower().startswith("data:"):
            message = "must be a data URL, such as 'data:image/png;base64,...'"
            raise PlacedError(("image_url",), f"{message}, got {self.image_url!r:.80}")
        return self


class Item(ApiModel):
    """A message of the conversation, a function call requested by the model, or its output.

    An ``item_reference`` among the items of a response stands for one of the conversation.
    """

    without_effect: ClassVar = frozenset(("object", "status"))

    type: Literal["message", "function_call", "function_call_output", "item_reference"]
    id: str | None = Field(default=None, min_length=1, max_length=64)
    role: Literal["system", "user", "assistant"] | None = None
    content: Annotated[list[ItemPart], Field(min_length=1)] | None = None
    call_id: str | None = Field(default=None, min_length=1)
    name: str | None = Field(default=None, min_length=1)
    arguments: JsonObject | None = None
    output: str | None = None

    @model_validator(mode="after")
    def _check_type_fields(self) -> Item:
        wanted = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "item_reference": ("id",),
        }[self.type]
        if self.id is None and "id" in wanted:
            raise PlacedError(("id",), "missing; it must be given")
        for name in ("role", "content", "call_id", "name", "arguments", "output"):
            check_part(self, (name,), name if name in wanted else "", f"an item {self.type!r}")
        for index, part in enumerate(self.content or ()):
            if part.type in ("input_audio", "input_image") and self.role != "user":
                place = ("content", index, "type")
                raise PlacedError(place, f"{part.type} is for items of users, not {self.role!r}")
        return self


class OneResponse(ResponseOptions):
    """Options of one response.

    Attributes:
        metadata: returned with the response.
        conversation: ``none`` keeps the response out of the conversation.
        input: items to respond to instead of those of the conversation.
    """

    metadata: dict[str, str] | None = None
    conversation: Literal["auto", "none"] = "auto"
    input: list[Item] | None = None

    @model_validator(mode="after")
    def _check_input(self) -> OneResponse:
        if self.input is not None and self.conversation != "none":
            raise PlacedError(("input",), "needs conversation to be 'none'")
        return self


class ClientEvent(ApiModel):
    """Base class of client events."""

    event_id: str | None = Field(default=None, max_length=512)


class UpdateSession(ClientEvent):
    """Change the session's options for later events; the second name is the beta's."""

    type: Literal["session.update", "transcription_session.update"]
    session: SessionUpdate


class AppendAudio(ClientEvent):
    """Append audio in the session's format, in base64, to the input buffer."""

    type: Literal["input_audio_buffer.append"]
    audio: str = Field(min_length=1)


class EndAudio(ClientEvent):
    """Commit the input buffer as an item, or clear it."""

    type: Literal["input_audio_buffer.commit", "input_audio_buffer.clear"]


class CreateItem(ClientEvent):
    """Add an item to the conversation: after another one, at the start (``root``) or at the end."""

    type: Literal["conversation.item.create"]
    previous_item_id: str | None = None
    item: Item


class AboutItem(ClientEvent):
    """Retrieve an item with its audio, or delete it from the conversation."""

    type: Literal["conversation.item.retrieve", "conversation.item.delete"]
    item_id: str = Field(min_length=1)


class TruncateItem(ClientEvent):
    """Truncate a spoken answer to the part that was heard."""

    type: Literal["conversation.item.truncate"]
    item_id: str = Field(min_length=1)
    content_index: Literal[0]
    audio_end_ms: int = Field(ge=0)


class CreateResponse(ClientEvent):
    """Start a response to the conversation."""

    type: Literal["response.create"]
    response: OneResponse = OneResponse()


class Cancel(ClientEvent):
    """Cancel the active response, unless ``response_id`` names another one."""

    type: Literal["response.cancel"]
    response_id: str | None = None


_KINDS = {
    kind: each
    for each in ClientEvent.__subclasses__()
    for kind in get_args(each.model_fields["type"].annotation)
}


class _AnyEvent(ApiModel):
    model_config: ClassVar = {"extra": "ignore"}

    type: str


class _NamedEvent(ApiModel):
    model_config: ClassVar = {"extra": "ignore"}

    event_id: Annotated[str, Field(max_length=512)]


def parse_event(text: str) -> ClientEvent:
    """Parse an event; an error names its invalid field."""
    kind = parse_json(text, _AnyEvent).type
    model = _KINDS.get(kind)
    if model is None:
        known = ", ".join(_KINDS)
        raise ApiError.bad_field("type", f"unknown event {kind!r:.80}; known are {known}")
    return parse_json(text, model)


def event_id_of(text: str) -> str | None:
    """Return the client's id of a possibly invalid event; None if it cannot be read."""
    try:
        return parse_json(text, _NamedEvent).event_id
    except ApiError:
        return None


_OUTPUT_PREFIX = re.compile(r"\boutput_(text|audio)")
"""Prefix in the types of events and parts; beta names have only the captured word."""


def to_older_names(event: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Convert an event to its beta names; return None for an event unknown to the beta."""
    if event["type"] == "conversation.item.done":
        return None
    older: dict[str, Any]
    older = _to_older_types({key: value for key, value in event.items() if key != "session"})
    if event["type"] == "conversation.item.added":
        older["type"] = "conversation.item.created"
    if "session" in event:
        older["session"] = _to_older_session(event["session"])
        if event["session"]["type"] == "transcription" and event["type"] == "session.updated":
            older["type"] = "transcription_session.updated"
    if "response" in older:
        older["response"]["modalities"] = _older_modalities(
            older["response"].pop("output_modalities", None)
        )
    return older


def _older_modalities(value: Any) -> Any:
    return ["text", "audio"] if value == ["audio"] else value


def _to_older_types(value: Any) -> Any:
    """Return an event, or a value in it, with the beta types of parts."""
    if isinstance(value, list):
        return [_to_older_types(each) for each in value]
    if not isinstance(value, dict):
        return value
    older = {key: _to_older_types(each) for key, each in value.items()}
    if isinstance(kind := value.get("type"), str):
        older["type"] = _OUTPUT_PREFIX.sub(r"\1", kind)
    return older


def _to_older_session(session: Mapping[str, Any]) -> Mapping[str, Any]:
    left_out = ("type", "audio", "output_modalities", "max_output_tokens")
    older = {key: value for key, value in session.items() if key not in left_out}
    formats = {newer: name for name, newer in _OLDER_FORMATS.items()}
    for name, path in _OLDER_OPTIONS.items():
        if session["type"] == "transcription" and path[:2] != ("audio", "input"):
            continue
        value: Any = session
        for step in path:
            value = value.get(step) if isinstance(value, dict) else None
        if name.endswith("audio_format"):
            value = formats[value["type"]]
        older[name] = _older_modalities(value)
    return older
