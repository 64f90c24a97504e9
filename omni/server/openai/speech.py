"""Speech: text in, sound out, as a file or as the pieces of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field
from starlette.requests import Request

from engine import ChatPrompt, Prompt
from omni.pipelines.voices import speak_like
from omni.server.openai.answers import TokenCount, as_event, usage_of
from omni.server.openai.chat_request import StageFields, Voice, merge_sampling
from omni.server.openai.spoken_file import AUDIO_FILES, AudioFileFormat, SpokenFile
from omni.server.serving.api_error import ApiError
from omni.server.serving.pipeline_response import EVENTS, PipelineResponse
from omni.server.serving.request_body import fetched

if TYPE_CHECKING:
    from omni.pipelines.pipeline import Pipeline


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


class SpeechRequest(StageFields):
    """A request for speech.

    Without a voice of the pipeline, its own choice speaks, or that of a recording, a data URL or an
    address: ``ref_text`` is what is said there, for models that need it. ``pcm`` is samples of 16
    bits, little-endian, 24,000 a second.
    """

    model: str
    input: str = Field(min_length=1)
    voice: Voice | None = None
    response_format: AudioFileFormat = "mp3"
    instructions: str | None = None
    ref_audio: str | None = None
    ref_text: str | None = None
    speed: float = Field(default=1.0, ge=0.25, le=4.0)
    stream_format: Literal["audio", "sse"] = "audio"


class Speech(PipelineResponse):
    """The response to a request for speech: a file as it is made, by itself or in events.

    The pipeline answers as in a chat: whether it reads the input aloud or replies to it, is the
    model's nature.
    """

    prompt_param = "input"

    def __init__(self, request: Request, body: SpeechRequest) -> None:
        self._has_events = body.stream_format == "sse"
        media_type = EVENTS if self._has_events else AUDIO_FILES[body.response_format][0]
        super().__init__(request, body.model, is_streamed=True, media_type=media_type)
        self._stage = speaking_stage(self.stages, "model")
        check_voice(self.stages, body.voice, "voice")
        if body.ref_text is not None and body.ref_audio is None:
            raise ApiError.bad_field("ref_text", "is what ref_audio says, which is missing")
        if body.ref_audio is not None and any(one.speakers for one in self.stages.stages.values()):
            raise ApiError.bad_field("ref_audio", "this model speaks in voices of its own only")
        self._sampling = merge_sampling(self.stages, self._stage, {}, body.stages, {})
        self._body = body
        self._file = SpokenFile(body.response_format, body.speed)
        self._count = TokenCount()

    async def pieces(self) -> AsyncIterator[bytes]:
        """The answer as it is made; a file of it does not know its length at the beginning."""
        counted = next(iter(self.stages.final_stages))  # tokens as in a chat
        body, prompt = self._body, await self._prompt()
        made = self.client.request(prompt, self._sampling, speaker=body.voice, **body.scheduling)
        async with self.stream([made], [self._stage]) as stream:
            async for update in stream.updates():
                if (delta := update.of(counted)) is not None:
                    self._count.add(delta)
                sound = update.sound(self._stage)
                if sound is None or not sound.duration_s:
                    continue
                # Compressing takes a while, in which others' answers go on.
                if piece := await asyncio.to_thread(self._file.of, sound):
                    yield self._piece(piece)
        if not self._file.has_begun:
            raise ApiError(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                "the model made no sound: its speech ended, or reached max_tokens, before any",
                code="no_sound",
                headers={"x-should-retry": "false"},  # clients try again by themselves
            )
        if piece := await asyncio.to_thread(self._file.rest):
            yield self._piece(piece)
        if self._has_events:
            usage = usage_of([self._count])
            tokens = {
                "input_tokens": usage["prompt_tokens"],
                "output_tokens": usage["completion_tokens"],
                "total_tokens": usage["total_tokens"],
            }
            yield as_event({"type": "speech.audio.done", "usage": tokens})

    async def _prompt(self) -> Prompt:
        body = self._body
        messages: list[dict[str, Any]] = [{"role": "user", "content": body.input}]
        if body.instructions:
            messages.insert(0, {"role": "system", "content": body.instructions})
        prompt = ChatPrompt(tuple(messages))
        if body.ref_audio is None:
            return prompt
        room = self.server.settings.limits.max_body_bytes
        sound = await fetched(body.ref_audio, "ref_audio", self.server.fetcher, room)
        return speak_like(prompt, sound, body.ref_text)

    def _piece(self, content: bytes) -> bytes:
        # In JSON bytes are base64.
        event = {"type": "speech.audio.delta", "audio": content}
        return as_event(event) if self._has_events else content
