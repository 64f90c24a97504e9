"""What a client of a realtime session may say."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from engine.interface.placed_error import PlacedError
from omni.server.serving.api_error import ApiError
from omni.server.serving.request_body import ApiModel, check_part, parse_json

__all__ = [
    "AppendAudio",
    "Cancel",
    "ClearAudio",
    "CommitAudio",
    "CreateItem",
    "CreateResponse",
    "Item",
    "ResponseOptions",
    "SessionUpdate",
    "UpdateSession",
    "event_id_of",
    "parse_event",
]

_Rate = Annotated[int, Field(ge=1000, le=384_000)]


class _Format(ApiModel):
    type: Literal["audio/pcm"]
    rate: _Rate | None = None


class _AudioIn(ApiModel):
    not_supported: ClassVar = {"turn_detection": (), "transcription": (), "noise_reduction": ()}

    format: _Format | None = None


class _AudioOut(ApiModel):
    not_supported: ClassVar = {"speed": (1, 1.0)}

    format: _Format | None = None
    voice: str | None = Field(default=None, min_length=1)


class _Audio(ApiModel):
    input: _AudioIn | None = None
    output: _AudioOut | None = None


class ResponseOptions(ApiModel):
    """Options of one response, or of every response of a session; absent ones remain as they are.

    Attributes:
        instructions: of the system, before all items.
        output_modalities: ``text``, or ``audio`` with its text.
        audio: at which rates sound comes (24,000 samples a second where none is named) and goes
            (the pipeline's own), by whose voice.
        max_output_tokens: of the text; ``inf`` leaves it to the stage.
        stages: sampling parameters by stage, as in chats.
    """

    not_supported: ClassVar = {
        "tools": (),
        "tool_choice": ("auto", "none"),
        "conversation": ("auto",),
        "input": (),
        "prompt": (),
        "tracing": (),
        "include": (),
        "truncation": ("auto", "disabled"),
        "reasoning": (),
    }
    without_effect: ClassVar = frozenset(("metadata",))

    instructions: str | None = None
    output_modalities: (
        Annotated[list[Literal["text", "audio"]], Field(min_length=1, max_length=1)] | None
    ) = None
    audio: _Audio | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | Literal["inf"] | None = None
    stages: dict[str, dict[str, Any]] | None = None


class SessionUpdate(ResponseOptions):
    """Options of a session; its model is that of the address."""

    type: Literal["realtime"] = "realtime"
    model: str | None = None


class ItemPart(ApiModel):
    """A part of an item: text, or sound as samples of 16 bits in base64."""

    type: Literal["input_text", "input_audio", "output_text"]
    text: str | None = None
    audio: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _has_what_it_names(self) -> ItemPart:
        wanted = "audio" if self.type == "input_audio" else "text"
        check_part(self, ("text", "audio"), wanted, f"a part of type {self.type!r}")
        return self


class Item(ApiModel):
    """One turn of the conversation."""

    without_effect: ClassVar = frozenset(("object", "status"))

    type: Literal["message"]
    id: str | None = Field(default=None, min_length=1, max_length=64)
    role: Literal["system", "user", "assistant"]
    content: Annotated[list[ItemPart], Field(min_length=1)]

    @model_validator(mode="after")
    def _only_users_are_heard(self) -> Item:
        for index, part in enumerate(self.content):
            if part.type == "input_audio" and self.role != "user":
                place = ("content", index, "type")
                raise PlacedError(place, f"input_audio is for items of users, not {self.role!r}")
        return self


class _Event(ApiModel):
    event_id: str | None = Field(default=None, max_length=512)


class UpdateSession(_Event):
    """Change the session from now on."""

    type: Literal["session.update"]
    session: SessionUpdate


class AppendAudio(_Event):
    """Add samples of 16 bits, in base64, to the buffer of sound."""

    type: Literal["input_audio_buffer.append"]
    audio: str = Field(min_length=1)


class CommitAudio(_Event):
    """Make an item of the buffer of sound."""

    type: Literal["input_audio_buffer.commit"]


class ClearAudio(_Event):
    """Empty the buffer of sound."""

    type: Literal["input_audio_buffer.clear"]


class CreateItem(_Event):
    """Add an item to the end of the conversation."""

    not_supported: ClassVar = {"previous_item_id": ()}

    type: Literal["conversation.item.create"]
    item: Item


class CreateResponse(_Event):
    """Answer the conversation."""

    type: Literal["response.create"]
    response: ResponseOptions = ResponseOptions()


class Cancel(_Event):
    """End the answer that is being given; if it is another one than is named, nothing ends."""

    type: Literal["response.cancel"]
    response_id: str | None = None


ClientEvent = (
    UpdateSession | AppendAudio | CommitAudio | ClearAudio | CreateItem | CreateResponse | Cancel
)
"""Any event of a client."""

_KINDS: dict[str, type[ClientEvent]] = {
    get_args(each.model_fields["type"].annotation)[0]: each for each in get_args(ClientEvent)
}


class _AnyEvent(ApiModel):
    model_config: ClassVar = {"extra": "ignore"}

    type: str


class _NamedEvent(ApiModel):
    model_config: ClassVar = {"extra": "ignore"}

    event_id: Annotated[str, Field(max_length=512)]


def parse_event(text: str) -> ClientEvent:
    """Read an event; an error names its wrong place."""
    kind = parse_json(text, _AnyEvent).type
    model = _KINDS.get(kind)
    if model is None:
        known = ", ".join(_KINDS)
        raise ApiError.bad_field("type", f"unknown event {kind!r:.80}; known are {known}")
    return parse_json(text, model)


def event_id_of(text: str) -> str | None:
    """Find the client's id of an event, whatever is wrong with it; None where it cannot be read."""
    try:
        return parse_json(text, _NamedEvent).event_id
    except ApiError:
        return None
