"""Answers requests for completions, in one piece or by events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.responses import Response

from omni.server.openai.answers import (
    CompletionAnswer,
    CompletionChoice,
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
    usage_so_far,
)
from omni.server.openai.chat_request import StreamOptions, merge_sampling, prompts_of
from omni.server.serving.asked import asked
from omni.server.serving.feeds import outputs_of_stage
from omni.server.serving.live_response import DONE, LastPiece

if TYPE_CHECKING:
    from omni.server.openai.chat_request import CompletionRequest
    from omni.server.serving.guard import Client
    from omni.server.serving.pipeline_server import ServedPipeline
    from stages import StageOutput

__all__ = ["Completions"]


@dataclass(slots=True)
class _Told:
    """What a stream has told of one completion; ``places`` is for log-probabilities."""

    places: TokenPlaces | None
    num_chars: int = 0
    num_logprobs: int = 0
    is_over: bool = False


class Completions:
    """One request for completions of some prompts, each ``n`` times.

    Args:
        pipeline: which.
        client: who asks.
        body: what.
        max_prompts: at most so many.

    Raises:
        ApiError: it cannot run as asked.
    """

    def __init__(
        self, pipeline: ServedPipeline, client: Client, body: CompletionRequest, max_prompts: int
    ) -> None:
        stages = pipeline.omni.pipeline
        prompts = prompts_of(body.prompt, max_prompts, "prompt")
        self._pipeline = pipeline
        self._stage = text_stage(stages)
        sampling = merge_sampling(stages, self._stage, body.sampling_fields(), body.stages, {})
        self._n = num_completions(stages, self._stage, sampling)
        self._logprobs = LogprobWriter(pipeline, self._stage) if body.logprobs is not None else None
        self._options = body.stream_options or StreamOptions()
        self._id = f"cmpl-{client.request_id}"
        self._created = int(time.time())
        self._requests = [
            asked(client, prompt, sampling, body.terms(), index=index)
            for index, prompt in enumerate(prompts)
        ]

    async def whole(self) -> Response:
        """All completions in one piece."""
        last = {index: output async for index, output in self._outputs()}
        outputs = [last[index] for index in range(len(self._requests))]
        choices = [
            choice
            for index, output in enumerate(outputs)
            for number, written in enumerate(completions_of(output, self._n))
            if (choice := self._new(index * self._n + number, written, self._nothing())) is not None
        ]
        answer = self._answer(choices)
        answer.usage = usage_of(outputs)
        return Response(as_json(answer), media_type="application/json")

    async def events(self) -> AsyncIterator[bytes]:
        """All completions piece by piece, as they come."""
        told = [self._nothing() for _ in range(self._n * len(self._requests))]
        last: dict[int, StageOutput] = {}
        async for index, output in self._outputs():
            last[index] = output
            for number, written in enumerate(completions_of(output, self._n)):
                at = index * self._n + number
                choice = self._new(at, written, told[at])
                if choice is not None:
                    usage = None
                    if self._options.counts_each_chunk:
                        usage = usage_so_far(output, written.num_tokens)
                    yield self._event_of([choice], usage)
        end = DONE
        if self._options.include_usage:
            end = self._event_of([], usage_of(list(last.values()))) + DONE
        yield LastPiece(end)

    def _outputs(self) -> AsyncIterator[tuple[int, StageOutput]]:
        return outputs_of_stage(self._pipeline, self._requests, "prompt", self._stage)

    def _nothing(self) -> _Told:
        """Of a completion that begins."""
        return _Told(None if self._logprobs is None else self._logprobs.places())

    def _new(self, index: int, written: Written, told: _Told) -> CompletionChoice | None:
        """What is new of one completion, if anything."""
        text, logprobs = written.text[told.num_chars :], written.logprobs[told.num_logprobs :]
        ends = written.finish_reason is not None and not told.is_over
        if not (text or ends or (logprobs and self._logprobs)):
            return None
        choice = CompletionChoice(
            index=index, text=text, logprobs=None, finish_reason=written.finish_reason
        )
        if self._logprobs is not None and told.places is not None:
            choice.logprobs = self._logprobs.completion(logprobs, told.places)
        told.num_chars, told.num_logprobs = len(written.text), len(written.logprobs)
        told.is_over = ends or told.is_over
        return choice

    def _event_of(self, choices: list[CompletionChoice], usage: Usage | None) -> bytes:
        answer = self._answer(choices)
        if self._options.include_usage:
            answer.usage = usage  # null where it is not counted
        return as_event(answer)

    def _answer(self, choices: list[CompletionChoice]) -> CompletionAnswer:
        return CompletionAnswer(
            id=self._id,
            object="text_completion",
            created=self._created,
            model=self._pipeline.name,
            choices=choices,
        )
