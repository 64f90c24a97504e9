"""Answers a chat, in one piece or by events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from engine import ChatPrompt
from omni.server.openai.answers import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessageAnswer,
    Usage,
    as_event,
    as_json,
)
from omni.server.openai.sampling_fields import merge_sampling
from omni.server.openai.written_text import (
    LogprobWriter,
    Written,
    completions_of,
    text_stage,
    usage_of,
)
from omni.server.serving.api_error import ApiError
from omni.server.serving.asked import asked
from omni.server.serving.feeds import Feeds

if TYPE_CHECKING:
    from omni.requests.request import OmniRequest
    from omni.server.openai.chat_request import ChatMessage, ChatRequest, ContentPart
    from omni.server.serving.guard import Client
    from omni.server.serving.served_pipeline import ServedPipeline
    from stages import StageOutput

__all__ = ["Chat"]

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class _Told:
    """What a stream has told of one completion."""

    has_begun: bool = False
    num_chars: int = 0
    num_logprobs: int = 0
    is_over: bool = False


class Chat:
    """One chat request to one pipeline.

    Args:
        pipeline: which.
        client: who asks.
        body: what.

    Raises:
        ApiError: it cannot run as asked.
    """

    def __init__(self, pipeline: ServedPipeline, client: Client, body: ChatRequest) -> None:
        stages = pipeline.omni.pipeline
        self._pipeline = pipeline
        self._body = body
        self._stage = text_stage(stages)
        sampling = merge_sampling(
            stages, self._stage, body.sampling_fields(), body.stages, body.sampling_names
        )
        params = sampling.get(self._stage, stages.stages[self._stage].sampling)
        self._n = params.n if params is not None else 1
        self._logprobs: LogprobWriter | None = None
        if body.logprobs:
            if self._n > 1:
                raise ApiError.bad_request("logprobs: not told of n > 1 answers", param="logprobs")
            self._logprobs = LogprobWriter(stages, self._stage)
        self._id = f"chatcmpl-{client.request_id}"
        self._created = int(time.time())
        prompt = ChatPrompt(tuple(_message(each) for each in body.messages))
        self._request: OmniRequest = asked(
            client, prompt, sampling, priority=body.priority, cache_salt=body.cache_salt
        )

    async def whole(self) -> Response:
        """The answer in one piece."""
        output: StageOutput | None = None
        async for newest in self._outputs():
            output = newest
        assert output is not None
        choices = [
            ChatChoice(
                index=index,
                message=ChatMessageAnswer(role="assistant", content=each.text),
                logprobs=self._logprobs.chat(each.logprobs) if self._logprobs else None,
                finish_reason=each.finish_reason,
            )
            for index, each in enumerate(completions_of(output))
        ]
        answer = ChatAnswer(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._pipeline.name,
            choices=choices,
            usage=usage_of([output]),
        )
        return Response(as_json(answer), media_type="application/json")

    async def events(self) -> AsyncIterator[bytes]:
        """The answer piece by piece."""
        told = [_Told() for _ in range(self._n)]
        output: StageOutput | None = None
        async for output in self._outputs():
            for index, written in enumerate(completions_of(output)):
                for choice in self._new(index, written, told[index]):
                    yield as_event(self._chunk([choice]))
        assert output is not None
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield as_event(self._chunk([], usage_of([output])))
        yield DONE

    async def _outputs(self) -> AsyncIterator[StageOutput]:
        """What the stage has written, up to its end; nothing that comes later is waited for."""
        async with Feeds(self._pipeline, [self._request], "messages") as feeds:
            async for update in feeds.updates():
                output = update.output.stages.get(self._stage)
                if output is None:
                    continue
                yield output
                if output.finished:
                    return

    def _new(self, index: int, written: Written, told: _Told) -> list[ChatChunkChoice]:
        """What is new of one completion: its beginning, its text, its end."""
        choices = []
        if not told.has_begun:
            told.has_begun = True
            choices.append(_choice(index, ChatDelta(role="assistant", content="")))
        text, logprobs = written.text[told.num_chars :], written.logprobs[told.num_logprobs :]
        if text or (logprobs and self._logprobs):
            choice = _choice(index, ChatDelta(content=text))
            if self._logprobs is not None:
                choice.logprobs = self._logprobs.chat(logprobs)
            choices.append(choice)
        told.num_chars, told.num_logprobs = len(written.text), len(written.logprobs)
        if written.finish_reason is not None and not told.is_over:
            told.is_over = True
            choices.append(_choice(index, ChatDelta(), written.finish_reason))
        return choices

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        chunk = ChatChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._pipeline.name,
            choices=choices,
        )
        options = self._body.stream_options
        if options is not None and options.include_usage:
            chunk.usage = usage  # null but in the last one
        return chunk


def _choice(index: int, delta: ChatDelta, finish_reason: str | None = None) -> ChatChunkChoice:
    return ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=finish_reason)


def _message(message: ChatMessage) -> Mapping[str, Any]:
    """A message as chat templates know it."""
    role = "system" if message.role == "developer" else message.role
    if isinstance(message.content, str):
        return {"role": role, "content": message.content}
    return {"role": role, "content": [_part(part) for part in message.content]}


def _part(part: ContentPart) -> Mapping[str, Any]:
    if part.type != "text":
        raise ApiError.bad_request(f"parts of type {part.type!r} are not supported yet")
    return {"type": "text", "text": part.text}
