"""Responses to chats, in one piece or by events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import UNSET
from starlette.responses import Response

from omni.server.openai.answers import (
    Answer,
    AssistantMessage,
    ChatAudio,
    Choice,
    LogprobWriter,
    TextEvent,
    Usage,
    Written,
    as_event,
    as_json,
    completions_of,
    num_completions,
    text_stage,
    usage_of,
)
from omni.server.openai.chat_request import StreamOptions, chat_prompt, merge_sampling
from omni.server.openai.speech import (
    check_voice,
    encoded,
    pcm16,
    sound_of,
    speaking_stage,
)
from omni.server.serving.pipeline_response import DONE, PipelineResponse

if TYPE_CHECKING:
    from engine import Waveform
    from omni.server.openai.chat_request import ChatRequest
    from omni.server.serving.parsed_request import Client
    from omni.server.serving.pipeline_server import PipelineServer
    from omni.server.serving.response_stream import ResponseStream
    from stages import StageOutput

__all__ = ["Chat"]


@dataclass(slots=True)
class _Sent:
    """How much of one completion a stream has sent."""

    has_begun: bool = False
    num_chars: int = 0
    num_logprobs: int = 0
    is_over: bool = False


class Chat(PipelineResponse):
    """The response to a chat request."""

    prompt_param = "messages"

    def __init__(self, server: PipelineServer, client: Client, body: ChatRequest) -> None:
        super().__init__(server, client, body.model, is_streamed=body.stream)
        self.pipeline.check_room(client)  # before files are decoded and fetched
        self._body = body
        stages = self.stages
        self._stage = text_stage(stages)
        self._voice: str | None = None
        if body.audio is not None:
            self._voice = speaking_stage(stages, "modalities")
            check_voice(stages, body.audio.voice, "audio.voice")
        self._sampling = merge_sampling(
            stages, self._stage, body.sampling_fields(), body.stages, body.sampling_names
        )
        self._n = num_completions(stages, self._stage, self._sampling)
        self._logprobs = LogprobWriter(self.pipeline, self._stage) if body.logprobs else None
        self._options = body.stream_options or StreamOptions()
        self._id = f"chatcmpl-{client.request_id}"
        self._audio_id = f"audio-{client.request_id}"
        self._created = int(time.time())
        self._text_event = TextEvent(lambda text: self._chunk([self._text_choice(0, text)]))

    async def whole(self) -> Response:
        """The answer in one piece."""
        async with await self._stream() as stream:
            (last,) = await stream.last_outputs()
        output = last.stages[self._stage]
        completions = completions_of(output, self._n)
        messages = [AssistantMessage(role="assistant", content=each.text) for each in completions]
        sound = sound_of(last, self._voice) if self._voice is not None else None
        if sound is not None:  # else the text is the answer, as in a stream
            messages[0].audio = await self._file(sound, output.text or "")
        answer = self._answer(
            "chat.completion",
            [
                Choice(
                    index=index,
                    message=message,
                    logprobs=self._logprobs.chat(each.logprobs) if self._logprobs else None,
                    finish_reason=each.finish_reason,
                )
                for index, (message, each) in enumerate(zip(messages, completions, strict=True))
            ],
        )
        answer.usage = usage_of([output])
        return Response(as_json(answer), media_type="application/json")

    async def pieces(self) -> AsyncIterator[bytes]:
        """The answer by events: text and sound as they come."""
        sent = [_Sent() for _ in range(self._n)]
        output: StageOutput | None = None
        piece, goes_on = b"", False
        async with await self._stream() as stream:
            async for update in stream.updates():
                output = update.output.stages.get(self._stage, output)
                sounds = update.sounds.get(self._voice) if self._voice is not None else None
                if goes_on and output is not None and not (sounds or update.is_last):
                    piece = self._text_of(output, sent[0])
                else:
                    is_plain = not (self._logprobs or self._options.counts_each_chunk)
                    goes_on = output is not None and self._n == 1 and is_plain
                    new = self._new(output, sounds, sent, is_over=update.is_last)
                    # Together, and the last ones with the end: each piece is a call of the system,
                    # and wakes the client.
                    piece = b"".join([self._event_of(choice, output) for choice in new])
                if piece and not update.is_last:
                    yield piece
        assert output is not None
        if self._options.include_usage:
            piece += as_event(self._chunk([], usage_of([output])))
        yield piece + DONE

    async def _stream(self) -> ResponseStream:
        body, limits = self._body, self.server.settings.limits
        prompt = await chat_prompt(body.messages, self.server.fetcher, limits.max_body_bytes)
        request = self.client.request(
            prompt,
            self._sampling,
            priority=body.priority,
            cache_salt=body.cache_salt,
            speaker=body.audio.voice if body.audio is not None else None,
        )
        stages = [self._stage] if self._voice is None else [self._stage, self._voice]
        return self.stream([request], stages)

    def _event_of(self, choice: Choice, output: StageOutput | None) -> bytes:
        """The event of what is new of one completion."""
        usage = None
        if self._options.counts_each_chunk and output is not None:
            is_first = isinstance(choice.delta, AssistantMessage) and choice.delta.role is not UNSET
            written = completions_of(output, self._n)[choice.index]
            usage = usage_of([output], 0 if is_first else written.num_tokens)
        return as_event(self._chunk([choice], usage))

    def _text_of(self, output: StageOutput, sent: _Sent) -> bytes:
        """The event of text that goes on, if there is any."""
        text, num_chars = output.text or "", sent.num_chars
        sent.num_chars = len(text)
        return self._text_event.of(text[num_chars:]) if len(text) > num_chars else b""

    def _new(
        self,
        output: StageOutput | None,
        sounds: Sequence[Waveform] | None,
        sent: Sequence[_Sent],
        *,
        is_over: bool,
    ) -> list[Choice]:
        """What is new: of each completion its beginning and its text, sound, and what has ended."""
        completions = completions_of(output, self._n) if output is not None else []
        new: list[Choice] = []
        for index, written in enumerate(completions):
            self._add_text(new, index, written, sent[index])
        if sounds:
            new.append(Choice(index=0, delta=AssistantMessage(audio=self._piece(sounds))))
        if self._voice is None or is_over:
            for index, written in enumerate(completions):
                if written.finish_reason is not None and not sent[index].is_over:
                    sent[index].is_over = True
                    reason = written.finish_reason
                    new.append(Choice(index=index, delta=AssistantMessage(), finish_reason=reason))
        return new

    def _add_text(self, new: list[Choice], index: int, written: Written, sent: _Sent) -> None:
        if not sent.has_begun:
            sent.has_begun = True
            new.append(Choice(index=index, delta=AssistantMessage(role="assistant", content="")))
        text, logprobs = written.text[sent.num_chars :], written.logprobs[sent.num_logprobs :]
        if text or (logprobs and self._logprobs):
            choice = self._text_choice(index, text)
            if self._logprobs is not None:
                choice.logprobs = self._logprobs.chat(logprobs)
            new.append(choice)
        sent.num_chars, sent.num_logprobs = len(written.text), len(written.logprobs)

    def _text_choice(self, index: int, text: str) -> Choice:
        delta = AssistantMessage(content=text)
        if self._voice is not None:
            delta.audio = ChatAudio(id=self._audio_id, transcript=text)
        return Choice(index=index, delta=delta)

    def _piece(self, sounds: Sequence[Waveform]) -> ChatAudio:
        return ChatAudio(
            id=self._audio_id,
            data=pcm16(sounds),
            sampling_rate=sounds[0].sampling_rate,
        )

    async def _file(self, sound: Waveform, transcript: str) -> ChatAudio:
        assert self._body.audio is not None
        content = await encoded(sound, self._body.audio.format)
        return ChatAudio(
            id=self._audio_id,
            data=content,
            transcript=transcript,
            expires_at=self._created,
            sampling_rate=sound.sampling_rate,
        )

    def _chunk(self, choices: list[Choice], usage: Usage | None = None) -> Answer:
        chunk = self._answer("chat.completion.chunk", choices)
        if self._options.include_usage:
            chunk.usage = usage  # null where it is not counted
        return chunk

    def _answer(self, kind: str, choices: list[Choice]) -> Answer:
        return Answer(
            id=self._id,
            object=kind,
            created=self._created,
            model=self.pipeline.name,
            choices=choices,
        )
