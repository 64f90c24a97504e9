"""Responses to requests for completions, in one piece or by events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.responses import Response

from omni.server.openai.answers import (
    Answer,
    Choice,
    LogprobWriter,
    TokenPlaces,
    Usage,
    Written,
    as_event,
    as_json,
    completions_of,
    num_completions,
    text_stage,
    usage_of,
)
from omni.server.openai.chat_request import StreamOptions, merge_sampling, prompts_of
from omni.server.serving.pipeline_response import DONE, PipelineResponse

if TYPE_CHECKING:
    from omni.server.openai.chat_request import CompletionRequest
    from omni.server.serving.parsed_request import Client
    from omni.server.serving.pipeline_server import PipelineServer
    from stages import StageOutput

__all__ = ["Completions"]


@dataclass(slots=True)
class _Sent:
    """How much of one completion a stream has sent; ``places`` is for log-probabilities."""

    places: TokenPlaces | None
    num_chars: int = 0
    num_logprobs: int = 0
    is_over: bool = False


class Completions(PipelineResponse):
    """The response to a request for completions of some prompts, each ``n`` times."""

    def __init__(self, server: PipelineServer, client: Client, body: CompletionRequest) -> None:
        super().__init__(server, client, body.model, is_streamed=body.stream)
        stages = self.stages
        prompts = prompts_of(body.prompt, server.settings.limits.max_prompts, "prompt")
        self._stage = text_stage(stages)
        sampling = merge_sampling(stages, self._stage, body.sampling_fields(), body.stages, {})
        self._n = num_completions(stages, self._stage, sampling)
        self._logprobs = (
            LogprobWriter(self.pipeline, self._stage) if body.logprobs is not None else None
        )
        self._options = body.stream_options or StreamOptions()
        self._id = f"cmpl-{client.request_id}"
        self._created = int(time.time())
        self._requests = [
            client.request(
                prompt,
                sampling,
                index=index,
                priority=body.priority,
                cache_salt=body.cache_salt,
            )
            for index, prompt in enumerate(prompts)
        ]

    async def whole(self) -> Response:
        """All completions in one piece."""
        async with self.stream(self._requests, [self._stage]) as stream:
            outputs = [last.stages[self._stage] for last in await stream.last_outputs()]
        choices = [
            choice
            for index, output in enumerate(outputs)
            for number, written in enumerate(completions_of(output, self._n))
            if (choice := self._new(index * self._n + number, written, self._nothing())) is not None
        ]
        answer = self._answer(choices)
        answer.usage = usage_of(outputs)
        return Response(as_json(answer), media_type="application/json")

    async def pieces(self) -> AsyncIterator[bytes]:
        """All completions by events, as they come."""
        sent = [self._nothing() for _ in range(self._n * len(self._requests))]
        last: dict[int, StageOutput] = {}
        async with self.stream(self._requests, [self._stage]) as stream:
            async for update in stream.updates():
                output = update.output.stages.get(self._stage)
                if output is None:
                    continue
                last[update.index] = output
                for number, written in enumerate(completions_of(output, self._n)):
                    at = update.index * self._n + number
                    choice = self._new(at, written, sent[at])
                    if choice is not None:
                        usage = None
                        if self._options.counts_each_chunk:
                            usage = usage_of([output], written.num_tokens)
                        yield self._event_of([choice], usage)
        end = DONE
        if self._options.include_usage:
            end = self._event_of([], usage_of(list(last.values()))) + DONE
        yield end

    def _nothing(self) -> _Sent:
        """Of a completion that begins."""
        return _Sent(None if self._logprobs is None else self._logprobs.places())

    def _new(self, index: int, written: Written, sent: _Sent) -> Choice | None:
        """What is new of one completion, if anything."""
        text, logprobs = written.text[sent.num_chars :], written.logprobs[sent.num_logprobs :]
        ends = written.finish_reason is not None and not sent.is_over
        if not (text or ends or (logprobs and self._logprobs)):
            return None
        choice = Choice(index=index, text=text, finish_reason=written.finish_reason)
        if self._logprobs is not None and sent.places is not None:
            choice.logprobs = self._logprobs.completion(logprobs, sent.places)
        sent.num_chars, sent.num_logprobs = len(written.text), len(written.logprobs)
        sent.is_over = ends or sent.is_over
        return choice

    def _event_of(self, choices: list[Choice], usage: Usage | None) -> bytes:
        answer = self._answer(choices)
        if self._options.include_usage:
            answer.usage = usage  # null where it is not counted
        return as_event(answer)

    def _answer(self, choices: list[Choice]) -> Answer:
        return Answer(
            id=self._id,
            object="text_completion",
            created=self._created,
            model=self.pipeline.name,
            choices=choices,
        )
