"""What a stage has spoken, as files and as pieces of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine import Waveform
from engine.media.resampler import Resampler
from omni.server.serving.api_error import ApiError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from omni.pipelines.pipeline import Pipeline
    from omni.requests.request import OmniOutput

__all__ = [
    "TRANSCRIPT_GAP_S",
    "SpokenPieces",
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
        ApiError: with status 400: the pipeline has no such voice.
    """
    try:
        pipeline.voices.find(voice)
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


class SpokenPieces:
    """The sound of one answer as samples of 16 bits, piece by piece.

    Args:
        rate: samples a second that are wanted; None: as many as are made.

    Attributes:
        rate: of the samples; None until the first are made where any will do.
    """

    def __init__(self, rate: int | None = None) -> None:
        self.rate = rate
        self._resampler: Resampler | None = None

    def of(self, sounds: Sequence[Waveform]) -> bytes:
        """What sounds that follow the ones before make; perhaps nothing yet at another rate."""
        made = sounds[0].sampling_rate
        self.rate = self.rate or made
        if self.rate == made:
            return pcm16(sounds)
        if self._resampler is None:
            self._resampler = Resampler(made, self.rate)
        floats = (each.samples.float().numpy(force=True) for each in sounds)
        return b"".join(self._samples(self._resampler.resampled(each)) for each in floats)

    def rest(self) -> bytes:
        """What was held back until nothing more comes."""
        return b"" if self._resampler is None else self._samples(self._resampler.rest())

    def _samples(self, samples: NDArray[np.float32]) -> bytes:
        import torch  # a server answers before it is imported

        assert self.rate is not None
        return Waveform(torch.from_numpy(samples), self.rate).encoded("pcm16")


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
