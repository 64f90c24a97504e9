"""Speech: text in, sound out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field
from starlette.responses import Response

from engine import ChatPrompt
from omni.server.openai.sampling_fields import StageFields, merge_sampling
from omni.server.openai.spoken_sound import (
    TRANSCRIPT_GAP_S,
    check_voice,
    encoded,
    pcm16,
    sound_of,
    speaking_stage,
    wav_stream_header,
)
from omni.server.serving.api_error import ApiError
from omni.server.serving.asked import asked
from omni.server.serving.feeds import Feeds, Update

if TYPE_CHECKING:
    from omni.server.serving.guard import Client
    from omni.server.serving.served_pipeline import ServedPipeline

__all__ = ["Speech", "SpeechRequest"]

_MEDIA_TYPES = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "pcm": "application/octet-stream",
}


class SpeechRequest(StageFields):
    """A request for speech.

    Attributes:
        model: name of a pipeline that speaks.
        input: what a user says to it.
        voice: a speaker of the pipeline; without one, its own choice.
        response_format: of the sound; ``pcm`` is samples of 16 bits, little-endian.
        instructions: what the system says to it.
    """

    not_supported: ClassVar = {"speed": (1, 1.0), "stream_format": ("audio",)}

    model: str
    input: str = Field(min_length=1)
    voice: str | None = Field(default=None, min_length=1)
    response_format: Literal["wav", "mp3", "flac", "pcm"] = "mp3"
    instructions: str | None = None


class Speech:
    """One request for speech to one pipeline.

    The pipeline answers as in a chat: whether it reads the input aloud or replies to it, is the
    model's nature.

    Args:
        pipeline: which.
        client: who asks.
        body: what.

    Raises:
        ApiError: it cannot run as asked.
    """

    def __init__(self, pipeline: ServedPipeline, client: Client, body: SpeechRequest) -> None:
        stages = pipeline.omni.pipeline
        self._pipeline = pipeline
        self._stage = speaking_stage(stages, "model")
        check_voice(stages, body.voice, "voice")
        self._format = body.response_format
        messages: list[dict[str, Any]] = [{"role": "user", "content": body.input}]
        if body.instructions:
            messages.insert(0, {"role": "system", "content": body.instructions})
        prompt = ChatPrompt(tuple(messages))
        sampling = merge_sampling(stages, self._stage, {}, body.stages, {})
        self._request = asked(client, prompt, sampling, body.terms(body.voice))

    @property
    def media_type(self) -> str:
        """Of the answer."""
        return _MEDIA_TYPES[self._format]

    @property
    def is_streamed(self) -> bool:
        """Whether the answer can be played while it is made."""
        return self._format in ("wav", "pcm")

    async def whole(self) -> Response:
        """The answer as one file."""
        last: Update | None = None
        async for update in self._updates():
            last = update
        assert last is not None
        sound = sound_of(last.output, self._stage)
        if sound is None:
            raise _no_sound()
        return Response(await encoded(sound, self._format), media_type=self.media_type)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The answer as it is made; a file of it does not know its length at the beginning."""
        has_begun = False
        async for update in self._updates():
            sounds = update.sounds.get(self._stage)
            if not sounds:
                continue
            piece = pcm16(sounds)
            if not has_begun and self._format == "wav":
                piece = wav_stream_header(sounds[0].sampling_rate) + piece
            has_begun = True
            yield piece
        if not has_begun:
            raise _no_sound()

    async def _updates(self) -> AsyncIterator[Update]:
        gap = TRANSCRIPT_GAP_S  # of what nobody is told of, but the meters
        async with Feeds(self._pipeline, [self._request], "input", text_gap_s=gap) as feeds:
            async for update in feeds.updates():
                yield update
                made = update.output.stages.get(self._stage)
                if made is not None and made.finished:
                    return


def _no_sound() -> ApiError:
    """What tells that the pipeline made none."""
    return ApiError(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "the model made no sound",
        code="no_sound",
        headers={"x-should-retry": "false"},  # clients try again by themselves
    )
