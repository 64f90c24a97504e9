"""Audio input of a realtime session, and its conversation: text, audio, calls and their outputs."""

from __future__ import annotations

import asyncio
import json
import uuid
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from omni.server.openai.realtime_events import AudioFormat, Item, TurnDetection
from omni.server.openai.tools import add_call
from omni.server.serving.api_error import ApiError
from omni.server.serving.pipeline_server import ServedPipeline
from omni.server.serving.request_body import decode_base64

if TYPE_CHECKING:
    from engine.media.sound_file import Resampler
    from engine.media.voice_detector import SpeechTurns

_SLICE_S = 0.25
"""Seconds of audio per detector call; longer audio is processed in slices in a thread."""
_MARGIN_S = 0.2
"""Seconds kept in addition to the padding, on which the detector has not decided yet."""


@dataclass(frozen=True, slots=True)
class Sound:
    """16-bit samples with their sampling rate."""

    samples: bytes
    rate: int

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return len(self.samples) / 2 / self.rate

    @property
    def floats(self) -> NDArray[np.float32]:
        """The samples as floats between -1 and 1."""
        return np.frombuffer(self.samples, "<i2").astype(np.float32) / np.float32(2**15)


_MIN_COMMIT_S = 0.1
"""Minimum seconds of sound of a commit, as with OpenAI: models refuse shorter ones later."""
_SUBTYPES = {"audio/pcmu": "ULAW", "audio/pcma": "ALAW"}


def telephone_code(samples: bytes, kind: str) -> bytes:
    """Encode 16-bit samples as ``audio/pcmu`` or ``audio/pcma``."""
    import soundfile

    file = BytesIO()
    soundfile.write(file, np.frombuffer(samples, "<i2"), 8000, _SUBTYPES[kind], format="RAW")
    return file.getvalue()


def samples_of(content: bytes, form: AudioFormat) -> bytes:
    """Decode audio in a session's format to 16-bit samples."""
    if form.type == "audio/pcm":
        return content
    import soundfile

    how = {"samplerate": 8000, "channels": 1, "format": "RAW", "subtype": _SUBTYPES[form.type]}
    samples, _ = soundfile.read(BytesIO(content), dtype="int16", **how)
    return bytes(samples.astype("<i2").tobytes())


def whole_sound(samples: bytes, rate: int, place: str) -> Sound:
    """Create a sound; raise an error that names ``place`` if the last sample is incomplete."""
    if len(samples) % 2:
        raise ApiError.bad_field(
            place, f"samples of 16 bits have two bytes each, got {len(samples)} bytes"
        )
    return Sound(samples, rate)


@dataclass(frozen=True, slots=True)
class SpeechTurn:
    """Start or end of a user's speech turn.

    ``at_ms`` is where the item's audio starts or ends, from the start of all audio of the session;
    ``sound`` is the turn's audio, None at its start.
    """

    at_ms: int
    sound: Sound | None = None


class InputSound:
    """Buffer of input audio with detection of speech turns.

    During silence, only the padding that precedes speech is kept.
    """

    def __init__(self, form: AudioFormat, detection: TurnDetection) -> None:
        self.form = form
        self.detection = detection
        self._buffer = bytearray()
        self._num_dropped = self._num_heard = self._heard_from = 0
        self._turns: SpeechTurns | None = None
        self._resampler: Resampler | None = None

    def __len__(self) -> int:
        """Return the number of buffered bytes."""
        return len(self._buffer)

    def append(self, content: bytes) -> None:
        """Append audio in the session's format."""
        self._buffer += samples_of(content, self.form)

    async def turns(self) -> AsyncIterator[SpeechTurn]:
        """Process appended audio, and yield turns as they are detected.

        Raises:
            ApiError: the detector is not installed.
        """
        if self.detection.type == "none":
            return
        size = round(_SLICE_S * self.form.rate) * 2
        whole = self._num_dropped + len(self._buffer) // 2 * 2
        while self._num_heard < whole:
            begin = self._num_heard - self._num_dropped
            piece = bytes(self._buffer[begin : min(begin + size, whole - self._num_dropped)])
            if self._turns is not None and self._num_heard + size >= whole:
                found = self._detect(piece)
            else:  # in a thread: loading the detector is slow, and so are many slices
                found = await asyncio.to_thread(self._detect, piece)
            self._num_heard += len(piece)
            for begins, at_s in found:
                yield self._begin(at_s) if begins else self._end(at_s)
            if not self.is_speaking:
                kept_s = self.detection.prefix_padding_ms / 1000 + _MARGIN_S
                self._drop_before(self._num_heard - self._bytes_at(kept_s))

    @property
    def is_speaking(self) -> bool:
        """True while a speech turn has started but not ended."""
        return self._turns is not None and self._turns.is_speaking

    def take(self) -> Sound:
        """Return and clear the buffer, so that later audio belongs to a new turn.

        Raises:
            ApiError: the buffer has less than 100 ms, or its last sample is incomplete.
        """
        sound = whole_sound(bytes(self._buffer), self.form.rate, "audio")
        if sound.seconds < _MIN_COMMIT_S:
            raise ApiError.bad_request(
                f"the buffer has {1000 * sound.seconds:.0f} ms of sound; a commit takes at least "
                f"{1000 * _MIN_COMMIT_S:.0f} ms",
                code="input_audio_buffer_commit_empty",
            )
        self.clear()
        return sound

    def clear(self) -> None:
        """Clear the buffer."""
        self._num_dropped += len(self._buffer) // 2 * 2
        self._num_heard = self._num_dropped
        self._buffer.clear()
        self._resampler = None
        if self._turns is not None:
            self._turns.forget()

    def change(self, form: AudioFormat, detection: TurnDetection) -> None:
        """Change the format and the turn detection.

        Raises:
            ApiError: the buffer has audio of another format.
        """
        if form != self.form and self._buffer and (self._turns is None or self.is_speaking):
            raise ApiError.bad_field(
                "session.audio.input.format",
                f"{len(self._buffer)} bytes of {self.form.type} are in the buffer of sound; commit "
                "or clear it before its format changes",
            )
        if form != self.form:
            self.clear()
        if (form, detection) != (self.form, self.detection):
            self._turns = self._resampler = None
        self.form, self.detection = form, detection

    def _detect(self, piece: bytes) -> list[tuple[bool, float]]:
        # Imported lazily: audio libraries would delay the server's start.
        from engine.media.sound_file import Resampler
        from engine.media.voice_detector import DETECTOR_RATE, SpeechTurns, TurnSettings

        if self._turns is None:
            settings = TurnSettings(self.detection.threshold, self.detection.silence_s)
            try:
                self._turns = SpeechTurns(settings)
            except ValueError as error:
                place = "session.audio.input.turn_detection"
                raise ApiError.bad_field(place, str(error)) from error
        if self._resampler is None:
            self._resampler = Resampler(self.form.rate, DETECTOR_RATE)
            self._heard_from = self._num_heard
        begin_s = self._heard_from / 2 / self.form.rate
        found = self._turns.feed(self._resampler.resampled(Sound(piece, self.form.rate).floats))
        return [(begins, begin_s + at / DETECTOR_RATE) for begins, at in found]

    def _begin(self, at_s: float) -> SpeechTurn:
        padding_s = self.detection.prefix_padding_ms / 1000
        self._drop_before(self._bytes_at(max(0.0, at_s - padding_s)))
        return SpeechTurn(self._milliseconds(self._num_dropped))

    def _end(self, at_s: float) -> SpeechTurn:
        end = min(self._bytes_at(at_s), self._num_dropped + len(self._buffer) // 2 * 2)
        samples = bytes(self._buffer[: end - self._num_dropped])
        self._drop_before(end)
        return SpeechTurn(self._milliseconds(end), Sound(samples, self.form.rate))

    def _drop_before(self, place: int) -> None:
        num_bytes = min(max(0, place - self._num_dropped), len(self._buffer))
        del self._buffer[:num_bytes]
        self._num_dropped += num_bytes

    def _bytes_at(self, seconds: float) -> int:
        return round(seconds * self.form.rate) * 2

    def _milliseconds(self, place: int) -> int:
        return round(place / 2 / self.form.rate * 1000)


_ROOT = "root"
_ITEM_BYTES = 256
"""Approximate size of an item without its text and audio."""
_CHARACTERS_PER_S = 14
"""Approximate rate of speech, to estimate the duration of answers cut off while generated."""


def new_item_id() -> str:
    """Generate an item id."""
    return f"item_{uuid.uuid4().hex[:24]}"


@dataclass(slots=True)
class Part:
    """Text, audio with its transcript, or an image as a data URL.

    The transcript of audio is empty until the task ``transcription`` sets it. ``kind`` is the type
    of OpenAI's content parts.
    """

    kind: str
    text: str = ""
    sound: Sound | None = None
    image_url: str | None = None
    transcription: asyncio.Task[None] | None = None

    def describe(self, form: AudioFormat | None = None) -> dict[str, Any]:
        """Return the part in the format of events; with its sound in ``form``, if given."""
        if self.image_url is not None:
            return {"type": self.kind, "image_url": self.image_url}
        if self.sound is None:
            name = "transcript" if self.kind == "output_audio" else "text"
            return {"type": self.kind, name: self.text}
        described: dict[str, Any] = {"type": self.kind, "transcript": self.text or None}
        if form is not None:
            content = self.sound.samples
            if form.type in _SUBTYPES and self.sound.rate == form.rate:
                content = telephone_code(content, form.type)
            described["audio"] = b64encode(content).decode()
        return described


@dataclass(slots=True, kw_only=True)
class ConversationItem:
    """A message, a function call requested by the model, or the output of a call.

    Attributes:
        type: ``message``, ``function_call`` or ``function_call_output``.
        call: the fields of a call or its output.
        spoken_s: seconds of audio generated so far.
        is_spoken: true if the audio is complete.
    """

    id: str = field(default_factory=new_item_id)
    type: str = "message"
    role: str | None = None
    parts: list[Part] = field(default_factory=list)
    call: dict[str, str] = field(default_factory=dict)
    status: str = "completed"
    spoken_s: float = 0.0
    is_spoken: bool = False
    _whole_text: str | None = None

    @classmethod
    async def of(
        cls, item: Item, form: AudioFormat, pipeline: ServedPipeline, place: str = "item"
    ) -> ConversationItem:
        """Create an item from a client's, whose audio is in the session's format.

        Args:
            pipeline: the one that will read the item.
            place: path of the item in the event, for errors.

        Raises:
            ApiError: its sound or image cannot be read, or the model reads no images.
        """
        if item.type == "item_reference":
            raise ApiError.bad_field(f"{place}.type", "a reference stands for an existing item")
        if item.type != "message":
            call = item.model_dump(
                include={"call_id", "name", "arguments", "output"}, exclude_none=True
            )
            return cls(id=item.id or new_item_id(), type=item.type, call=call)
        parts: list[Part] = []
        reads = pipeline.describe()["modalities"]["input"]
        for index, part in enumerate(item.content or ()):
            at = f"{place}.content[{index}]"
            if part.image_url is not None:
                if "image" not in reads:
                    raise ApiError.bad_field(f"{at}.type", "this model reads no images")
                at_url = f"{at}.image_url"
                await asyncio.to_thread(_check_image, part.image_url, at_url, pipeline)
            if part.audio is None:
                parts.append(Part(part.type, part.text or "", image_url=part.image_url))
                continue
            at += ".audio"
            samples = samples_of(await decode_base64(part.audio, at), form)
            sound = whole_sound(samples, form.rate, at)
            if sound.seconds < _MIN_COMMIT_S:
                least = f"at least {1000 * _MIN_COMMIT_S:.0f} ms"
                message = f"must have {least} of sound, got {1000 * sound.seconds:.0f} ms"
                raise ApiError.bad_field(at, message)
            parts.append(Part(part.type, sound=sound))
        return cls(id=item.id or new_item_id(), role=item.role, parts=parts)

    @property
    def num_bytes(self) -> int:
        """Approximate size in bytes."""
        texts = sum(len(part.text) for part in self.parts) + sum(map(len, self.call.values()))
        sounds = sum(len(part.sound.samples) for part in self.parts if part.sound is not None)
        images = sum(len(part.image_url or "") for part in self.parts)
        return _ITEM_BYTES + texts + sounds + images

    @property
    def text(self) -> str:
        """Text and transcripts of all parts."""
        return " ".join(part.text for part in self.parts if part.text)

    def describe(self, form: AudioFormat | None = None) -> Mapping[str, Any]:
        """Return the item in the format of events; with its sound in ``form``, if given."""
        head = {"id": self.id, "object": "realtime.item", "type": self.type, "status": self.status}
        if self.type != "message":
            return head | self.call
        parts = [part.describe(form) for part in self.parts]
        return head | {"role": self.role, "content": parts}

    def keep_heard(self, seconds: float) -> None:
        """Truncate the text of a spoken answer to an estimate of the words in its first seconds."""
        (part,) = self.parts
        if self._whole_text is None:
            self._whole_text = part.text
        text = self._whole_text
        least_s = 0.0 if self.is_spoken else len(text) / _CHARACTERS_PER_S
        whole_s = max(self.spoken_s, least_s)
        if seconds >= whole_s:
            part.text = text
            return
        end = round(len(text) * seconds / whole_s)
        # A partly spoken word counts as not heard.
        part.text = text[: max(text.rfind(" ", 0, end + 1), 0)]


def _check_image(url: str, param: str, pipeline: ServedPipeline) -> None:
    # Imported lazily: the server must respond before torch is imported.
    from engine.media.image_file import open_image

    engines = (getattr(stage, "engine", None) for stage in pipeline.config.stages.values())
    limits = [getattr(each, "media_limits", None) for each in engines]
    try:
        open_image(url, next(filter(None, limits), None))
    except ValueError as error:
        raise ApiError.bad_field(param, str(error)) from error


class Conversation:
    """Items of a session; with the input buffer, they are limited to ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._by_id: dict[str, ConversationItem] = {}
        self.items: list[ConversationItem] = []

    def check_room(self, num_bytes: int) -> None:
        """Raise an error if this many more bytes would exceed the limit."""
        if self._num_bytes + num_bytes > self._max_bytes:
            raise ApiError.bad_request(
                f"the session would hold {self._num_bytes + num_bytes} bytes of text and sound, "
                f"of at most {self._max_bytes}; begin another",
                code="session_full",
            )

    def add(self, item: ConversationItem, previous_id: str | None = None) -> str | None:
        """Insert an item after another one, or append it; return the id of the item before it.

        Raises:
            ApiError: there is no room, no such previous item, or an item with the same id.
        """
        if item.id in self._by_id:
            raise ApiError.bad_field("item.id", f"there is an item {item.id!r} already")
        place = len(self.items)
        if previous_id == _ROOT:
            place = 0
        elif previous_id is not None:
            place = self.items.index(self.find(previous_id, "create", "previous_item_id")) + 1
        self.check_room(item.num_bytes)
        self._num_bytes += item.num_bytes
        self._by_id[item.id] = item
        self.items.insert(place, item)
        return self.items[place - 1].id if place else None

    def count(self, num_bytes: int) -> None:
        """Count the growth of an item."""
        self._num_bytes += num_bytes

    def find(self, item_id: str, action: str, param: str = "item_id") -> ConversationItem:
        """Return an item by its id, or raise an :class:`ApiError` for this action."""
        found = self._by_id.get(item_id)
        if found is None:
            code = f"item_{action}_invalid_item_id"
            raise ApiError.bad_field(param, f"there is no item {item_id!r:.80}", code)
        return found

    def delete(self, item_id: str) -> None:
        """Remove an item."""
        item = self.find(item_id, "delete")
        _check_ended(item)
        self._num_bytes -= item.num_bytes
        del self._by_id[item_id]
        self.items.remove(item)
        for part in item.parts:
            if part.transcription is not None:
                part.transcription.cancel()

    def truncate(self, item_id: str, heard_s: float) -> None:
        """Truncate a spoken answer to the part that was heard."""
        item = self.find(item_id, "truncate")
        if not item.spoken_s:
            raise ApiError.bad_field("item_id", f"{item_id!r} is no answer that was spoken")
        _check_ended(item)
        if heard_s > item.spoken_s:
            raise ApiError.bad_field(
                "audio_end_ms",
                f"{item_id!r} has {item.spoken_s * 1000:.0f} ms of sound, got {heard_s * 1000:.0f}",
            )
        before = item.num_bytes
        item.keep_heard(heard_s)
        self._num_bytes += item.num_bytes - before


def _check_ended(item: ConversationItem) -> None:
    if item.status == "in_progress":
        raise ApiError.bad_field(
            "item_id", f"{item.id!r} is still being given; cancel its response first"
        )


def messages_of(
    items: Sequence[ConversationItem], instructions: str | None, *, hears: bool
) -> tuple[tuple[Mapping[str, Any], ...], tuple[Sound, ...], tuple[str, ...]]:
    """Convert items to chat messages, and return these with their sounds and images, in order.

    Args:
        hears: true if the model accepts audio; otherwise transcripts replace it.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    sounds: list[Sound] = []
    images: list[str] = []
    for item in items:
        if item.type == "function_call":
            call = item.call
            arguments = json.loads(call["arguments"] or "{}")  # as transformers documents it
            function = {"name": call["name"], "arguments": arguments}
            add_call(messages, {"id": call["call_id"], "type": "function", "function": function})
        elif item.type == "function_call_output":
            call = item.call
            messages.append(
                {"role": "tool", "tool_call_id": call["call_id"], "content": call["output"]}
            )
        else:
            parts: list[dict[str, str]] = []
            for part in item.parts:
                if part.image_url is not None:
                    images.append(part.image_url)
                    parts.append({"type": "image"})
                elif part.sound is not None and hears:
                    sounds.append(part.sound)
                    parts.append({"type": "audio"})
                elif part.text:
                    parts.append({"type": "text", "text": part.text})
            # Plain text for a single part: not every template supports lists of parts.
            is_text = len(item.parts) == 1 and parts and parts[0]["type"] == "text"
            if parts:
                messages.append({"role": item.role, "content": item.text if is_text else parts})
    return tuple(messages), tuple(sounds), tuple(images)
