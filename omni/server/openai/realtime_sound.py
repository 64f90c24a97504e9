"""Sound that comes into a realtime session: its formats, and the turns that are found in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from omni.server.openai.realtime_events import AudioFormat, TurnDetection
from omni.server.serving.api_error import ApiError

if TYPE_CHECKING:
    from engine.media.sound_file import Resampler
    from engine.media.voice_detector import SpeechTurns

_SLICE_S = 0.25
"""Of sound that is listened to at once; while a thread listens to more, others have their turn."""
_SPARE_S = 0.2
"""Kept beside the padding: what the detector has not decided yet."""


@dataclass(frozen=True, slots=True)
class Sound:
    """Samples of 16 bits, and how many a second."""

    samples: bytes
    rate: int

    @property
    def seconds(self) -> float:
        """How long it is."""
        return len(self.samples) / 2 / self.rate

    @property
    def floats(self) -> NDArray[np.float32]:
        """The samples between -1 and 1."""
        return np.frombuffer(self.samples, "<i2").astype(np.float32) / np.float32(2**15)


_TELEPHONES = {"audio/pcmu": "ULAW", "audio/pcma": "ALAW"}


def telephone_code(samples: bytes, kind: str) -> bytes:
    """Write samples of 16 bits in the codes of ``audio/pcmu`` or ``audio/pcma``."""
    import soundfile

    file = BytesIO()
    soundfile.write(file, np.frombuffer(samples, "<i2"), 8000, _TELEPHONES[kind], format="RAW")
    return file.getvalue()


def samples_of(content: bytes, form: AudioFormat) -> bytes:
    """Read samples of 16 bits from what is in a format of a session."""
    if form.type == "audio/pcm":
        return content
    import soundfile

    how = {"samplerate": 8000, "channels": 1, "format": "RAW", "subtype": _TELEPHONES[form.type]}
    samples, _ = soundfile.read(BytesIO(content), dtype="int16", **how)
    return bytes(samples.astype("<i2").tobytes())


def whole_sound(samples: bytes, rate: int, place: str) -> Sound:
    """Make a sound of samples; an error names their place in an event if the last is not whole."""
    if len(samples) % 2:
        raise ApiError.bad_field(
            place, f"samples of 16 bits have two bytes each, got {len(samples)} bytes"
        )
    return Sound(samples, rate)


@dataclass(frozen=True, slots=True)
class SpeechTurn:
    """That the user begins to speak, or has spoken.

    ``at_ms`` counts from the beginning of all sound of the session to where the item's sound begins
    or ends; ``sound`` is what was spoken, None where it begins.
    """

    at_ms: int
    sound: Sound | None = None


class InputSound:
    """The buffer of sound that comes in, and the turns of speech in it.

    During silence, no more of it is kept than goes before speech.
    """

    def __init__(self, form: AudioFormat, detection: TurnDetection) -> None:
        self.form = form
        self.detection = detection
        self._buffer = bytearray()
        self._num_dropped = self._num_heard = self._heard_from = 0
        self._turns: SpeechTurns | None = None
        self._resampler: Resampler | None = None

    def __len__(self) -> int:
        """Bytes that are held."""
        return len(self._buffer)

    def append(self, content: bytes) -> None:
        """Take sound in the session's format."""
        self._buffer += samples_of(content, self.form)

    async def turns(self) -> AsyncIterator[SpeechTurn]:
        """Listen to what was appended; yield turns as they are found.

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
            # Loading the detector takes long, and more pieces come where much was sent at once.
            is_little = self._turns is not None and self._num_heard + size >= whole
            if is_little:
                found = self._listen(piece)
            else:
                found = await asyncio.to_thread(self._listen, piece)
            self._num_heard += len(piece)
            for begins, at_s in found:
                yield self._begin(at_s) if begins else self._end(at_s)
            if not self.is_speaking:
                kept_s = self.detection.prefix_padding_ms / 1000 + _SPARE_S
                self._drop_before(self._num_heard - self._bytes_at(kept_s))

    @property
    def is_speaking(self) -> bool:
        """Whether speech has begun that has not ended."""
        return self._turns is not None and self._turns.is_speaking

    def take(self) -> Sound:
        """Take out all that is held; what comes next is no part of what was said before.

        Raises:
            ApiError: there is nothing, or the last sample is not whole.
        """
        if not self._buffer:
            raise ApiError.bad_request(
                "nothing was appended to the buffer of sound",
                code="input_audio_buffer_commit_empty",
            )
        sound = whole_sound(bytes(self._buffer), self.form.rate, "audio")
        self.clear()
        return sound

    def clear(self) -> None:
        """Empty it."""
        self._num_dropped += len(self._buffer) // 2 * 2
        self._num_heard = self._num_dropped
        self._buffer.clear()
        self._resampler = None
        if self._turns is not None:
            self._turns.forget()

    def change(self, form: AudioFormat, detection: TurnDetection) -> None:
        """Go on in another way.

        Raises:
            ApiError: sound of another format is held.
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

    def _listen(self, piece: bytes) -> list[tuple[bool, float]]:
        # Libraries for sound, which a server need not import before it answers.
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
