"""Responses to requests for completions, in one piece or by events."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response

from engine import Prompt, TextPrompt, TokensPrompt
from omni.server.openai.answers import (
    Choice,
    CompletionPart,
    TextResponse,
    TokenCount,
    as_json,
    parts_of,
    usage_of,
)
from omni.server.openai.chat_request import CompletionRequest, prompts_of
from omni.server.openai.tokenize import prompt_reader
from omni.server.serving.pipeline_response import DONE


class Completions(TextResponse):
    """The response to a request for completions of some prompts, each ``n`` times."""

    id_prefix = "cmpl"
    chunk_kind = "text_completion"

    def __init__(self, request: Request, body: CompletionRequest) -> None:
        super().__init__(request, body)
        prompts = prompts_of(body.prompt, self.server.settings.limits.max_prompts, "prompt")
        self._requests = [
            self.client.request(prompt, self._sampling, index=index, **body.scheduling)
            for index, prompt in enumerate(prompts)
        ]
        self._echoes: dict[int, str] = {}  # by completion, until they are sent
        if body.echo:
            texts = [self._text_of(prompt) for prompt in prompts]
            self._echoes = dict(enumerate(text for text in texts for _ in range(self._n)))

    async def whole(self) -> Response:
        """All completions in one piece."""
        async with self.stream(self._requests, [self._stage]) as stream:
            outputs = [last[self._stage] for last in await stream.last_outputs()]
        choices = [
            self._choice(index * self._n + number, written)
            for index, output in enumerate(outputs)
            for number, written in parts_of(output)
        ]
        answer = self._answer(self.chunk_kind, choices)
        answer.usage = usage_of([TokenCount(output) for output in outputs])
        return Response(as_json(answer), media_type="application/json")

    async def pieces(self) -> AsyncIterator[bytes]:
        """All completions by events, as they come."""
        counts = [TokenCount() for _ in self._requests]
        over: set[int] = set()
        async with self.stream(self._requests, [self._stage]) as stream:
            async for update in stream.updates():
                if (delta := update.of(self._stage)) is None:
                    continue
                count = counts[update.index]
                count.add(delta)
                for number, part in parts_of(delta):
                    at = update.index * self._n + number
                    ends = part.finish_reason is not None and at not in over
                    if part.text or ends or (part.logprobs and self._logprobs):
                        each = self._options.continuous_usage_stats
                        usage = count.usage_of(number) if each else None
                        yield self._event_of([self._choice(at, part)], usage)
                    if ends:
                        over.add(at)
        end = DONE
        if self._options.include_usage:
            end = self._event_of([], usage_of(counts)) + DONE
        yield end

    def _text_of(self, prompt: Prompt) -> str:
        if isinstance(prompt, TextPrompt):
            return prompt.prompt
        assert isinstance(prompt, TokensPrompt)
        tokenizer, _ = prompt_reader(self.server, self.pipeline.name)
        return str(tokenizer.decode(list(prompt.prompt_token_ids)))

    def _choice(self, index: int, part: CompletionPart) -> Choice:
        """All of a completion, or what is new of it."""
        reason = None if part.finish_reason is None else part.finish_reason.value
        text = self._echoes.pop(index, "") + (part.text or "")
        choice = Choice(index=index, text=text, finish_reason=reason)
        if self._logprobs is not None:
            choice.logprobs = self._logprobs.completion(part.logprobs or (), index)
        return choice
