"""Speech: text in, sound out, as a file or as the pieces of a stream."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from starlette.responses import Response

from engine import ChatPrompt, Waveform
from omni.server.openai.chat_request import StageFields, merge_sampling
from omni.server.serving.api_error import ApiError
from omni.server.serving.client import Client
from omni.server.serving.pipeline_response import PipelineResponse
from omni.server.serving.pipeline_server import PipelineServer
from stages import StageOutput

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.media.sound_file import Resampler
    from omni.pipelines.pipeline import Pipeline

_UNKNOWN_BYTES = 0xFFFFFFFF


def speaking_stage(pipeline: Pipeline, param: str) -> str:
    """Find the stage whose sound answers: the last one that the user gets sound of."""
    speaking = [name for name, stage in pipeline.stages.items() if "audio" in stage.final_output]
    if not speaking:
        raise ApiError.bad_field(param, "this model does not speak")
    return speaking[-1]


def check_voice(pipeline: Pipeline, voice: str | None, param: str) -> None:
    """Check a voice before anything runs."""
    try:
        pipeline.voices.find(voice)
    except ValueError as error:
        raise ApiError.bad_field(param, str(error)) from error


def sound_of(outputs: Mapping[str, StageOutput], stage: str) -> Waveform | None:
    """Return the whole sound of a stage; None if that is empty."""
    made = outputs.get(stage)
    sound = made.audio if made is not None else None
    return sound if sound is not None and sound.duration_s else None


class SpokenPieces:
    """Makes samples of 16 bits of the sound of one answer, piece by piece.

    ``rate`` is how many a second; without one, as many as the pipeline makes.
    """

    def __init__(self, rate: int | None = None) -> None:
        self.rate = rate
        self._resampler: Resampler | None = None

    def of(self, sound: Waveform) -> bytes:
        """Convert sound that follows that before; perhaps to nothing yet, at another rate."""
        made = sound.sampling_rate
        self.rate = self.rate or made
        if self.rate == made:
            return sound.encoded("pcm16")
        if self._resampler is None:
            # Libraries for sound, which a server need not import before it answers.
            from engine.media.sound_file import Resampler

            self._resampler = Resampler(made, self.rate)
        samples = sound.samples.float().numpy(force=True)
        return self._samples(self._resampler.resampled(samples))

    def rest(self) -> bytes:
        """Return what was held back until nothing more comes."""
        return b"" if self._resampler is None else self._samples(self._resampler.rest())

    def _samples(self, samples: NDArray[np.float32]) -> bytes:
        import torch  # a server answers before it is imported

        assert self.rate is not None
        return Waveform(torch.from_numpy(samples), self.rate).encoded("pcm16")


def wav_stream_header(sampling_rate: int) -> bytes:
    """Write the head of a WAV file of mono samples of 16 bits whose length is not known yet."""
    form = (16, 1, 1, sampling_rate, 2 * sampling_rate, 2, 16)
    return struct.pack(
        "<4sI8sIHHIIHH4sI", b"RIFF", _UNKNOWN_BYTES, b"WAVEfmt ", *form, b"data", _UNKNOWN_BYTES
    )


_MEDIA_TYPES = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "pcm": "application/octet-stream",
}


class SpeechRequest(StageFields):
    """A request for speech.

    Without a voice of the pipeline, its own choice speaks; ``pcm`` is samples of 16 bits,
    little-endian.
    """

    not_supported: ClassVar = {"speed": (1, 1.0), "stream_format": ("audio",)}

    model: str
    input: str = Field(min_length=1)
    voice: str | None = Field(default=None, min_length=1)
    response_format: Literal["wav", "mp3", "flac", "pcm"] = "mp3"
    instructions: str | None = None


class Speech(PipelineResponse):
    """The response to a request for speech.

    The pipeline answers as in a chat: whether it reads the input aloud or replies to it, is the
    model's nature.
    """

    prompt_param = "input"

    def __init__(self, server: PipelineServer, client: Client, body: SpeechRequest) -> None:
        self._format = body.response_format
        is_streamed = self._format in ("wav", "pcm")  # it can be played while it is made
        media_type = _MEDIA_TYPES[self._format]
        super().__init__(server, client, body.model, is_streamed=is_streamed, media_type=media_type)
        self._stage = speaking_stage(self.stages, "model")
        check_voice(self.stages, body.voice, "voice")
        messages: list[dict[str, Any]] = [{"role": "user", "content": body.input}]
        if body.instructions:
            messages.insert(0, {"role": "system", "content": body.instructions})
        prompt = ChatPrompt(tuple(messages))
        sampling = merge_sampling(self.stages, self._stage, {}, body.stages, {})
        self._request = body.request(client, prompt, sampling, speaker=body.voice)

    async def whole(self) -> Response:
        """The answer as one file."""
        async with self.stream([self._request], [self._stage]) as stream:
            (last,) = await stream.last_outputs()
        sound = sound_of(last, self._stage)
        if sound is None:
            raise _no_sound()
        content = await asyncio.to_thread(sound.encoded, self._format)
        return Response(content, media_type=self.media_type)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The answer as it is made; a file of it does not know its length at the beginning."""
        has_begun = False
        async with self.stream([self._request], [self._stage]) as stream:
            async for update in stream.updates():
                sound = update.sound(self._stage)
                if sound is None:
                    continue
                piece = sound.encoded("pcm16")
                if not has_begun and self._format == "wav":
                    piece = wav_stream_header(sound.sampling_rate) + piece
                has_begun = True
                yield piece
        if not has_begun:
            raise _no_sound()


def _no_sound() -> ApiError:
    return ApiError(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "the model made no sound",
        code="no_sound",
        headers={"x-should-retry": "false"},  # clients try again by themselves
    )
