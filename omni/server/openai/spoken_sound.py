"""What a stage has spoken, as files and as pieces of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from omni.server.serving.api_error import ApiError

if TYPE_CHECKING:
    from engine import Waveform
    from omni.pipelines.pipeline import Pipeline
    from omni.requests.request import OmniOutput

__all__ = [
    "TRANSCRIPT_GAP_S",
    "check_voice",
    "encoded",
    "pcm16",
    "sound_of",
    "speaking_stage",
    "wav_stream_header",
]

TRANSCRIPT_GAP_S = 0.1
"""For how long the text of an answer that is spoken may wait for the next token: it is read along
with the sound. Each event is a call of the system and wakes the client."""

_UNKNOWN_BYTES = 0xFFFFFFFF


def speaking_stage(pipeline: Pipeline, param: str) -> str:
    """The stage whose sound answers: the last one that the user gets sound of.

    Raises:
        ApiError: with status 400: there is none.
    """
    speaking = [name for name, stage in pipeline.stages.items() if "audio" in stage.final_output]
    if not speaking:
        raise ApiError.bad_request(f"{param}: this model does not speak", param=param)
    return speaking[-1]


def check_voice(pipeline: Pipeline, voice: str | None, param: str) -> None:
    """Check a voice before anything runs.

    Raises:
        ApiError: with status 400: no stage has it.
    """
    try:
        pipeline.check_speaker(voice)
    except ValueError as error:
        raise ApiError.bad_request(f"{param}: {error}", param=param) from error


async def encoded(sound: Waveform, kind: str) -> bytes:
    """A sound as a file of a kind, or ``pcm16``; made in another thread."""
    return await asyncio.to_thread(sound.encoded, kind)


def sound_of(output: OmniOutput, stage: str) -> Waveform | None:
    """All that a stage has spoken; None if that is nothing."""
    made = output.stages.get(stage)
    sound = made.audio if made is not None else None
    return sound if sound is not None and sound.duration_s else None


def pcm16(sounds: Sequence[Waveform]) -> bytes:
    """Pieces of sound as samples of 16 bits, little-endian."""
    return b"".join(sound.encoded("pcm16") for sound in sounds)


def wav_stream_header(sampling_rate: int) -> bytes:
    """What a WAV file of mono samples of 16 bits begins with whose length is not known yet."""
    numbers = [
        (16, 4), (1, 2), (1, 2), (sampling_rate, 4), (2 * sampling_rate, 4), (2, 2), (16, 2),
    ]  # fmt: skip
    form = b"".join(number.to_bytes(size, "little") for number, size in numbers)
    unknown = _UNKNOWN_BYTES.to_bytes(4, "little")
    return b"RIFF" + unknown + b"WAVEfmt " + form + b"data" + unknown
