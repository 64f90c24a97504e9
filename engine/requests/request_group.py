"""The completions of one user request, and the output they make together."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.interface.outputs import (
    CompletionDelta,
    CompletionOutput,
    FinishReason,
    OutputDelta,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
    WindowStart,
)
from engine.requests.request import Request, RequestTimes
from engine.text.stop_checker import CompletionText

__all__ = ["RequestGroup"]


@dataclass(slots=True)
class EndedSequences:
    """The kept tokens of the sequences that have ended, one after the other.

    Attributes:
        first: the first of them, from when it began.
        text: what the tokens say.
        token_ids: of all of them.
        logprobs: one entry per token, if they are asked for.
        windows: where the window of each of them begins.
    """

    first: Request
    text: CompletionText
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    windows: list[WindowStart] = field(default_factory=list)
    _rows: dict[str, list[Tensor]] = field(default_factory=dict)

    @classmethod
    def before(cls, request: Request) -> EndedSequences | None:
        """None yet, of a request that takes several; None for one that takes one."""
        return None if request.continuation is None else cls(request, request.text.without_end())

    def take_in(
        self,
        request: Request,
        num_kept: int,
        rows: Mapping[str, Tensor],
        encoder_rows: Mapping[str, Tensor],
    ) -> None:
        """Take what a sequence has come to."""
        kept = request.output_token_ids[:num_kept]
        if request.continuation is not None:
            start = WindowStart(len(self.token_ids), request.continuation.begin_s)
            self.windows.append(start)
        self.token_ids += kept
        self.logprobs += request.logprobs[:num_kept]
        for token_id in kept:
            self.text.append(token_id)
        length = request.num_prompt_tokens + num_kept
        for name, tensor in rows.items():
            self._rows.setdefault(name, []).append(tensor[:length])
        for name, tensor in encoder_rows.items():
            self._rows.setdefault(name, []).append(tensor)

    def tensors(self) -> Mapping[str, Tensor]:
        """The rows of all sequences, one after the other."""
        return {name: torch.cat(parts) for name, parts in self._rows.items()}

    def times(self, last: RequestTimes) -> RequestTimes:
        """From the beginning of the first sequence to the end of the last."""
        return replace(self.first.times, finished=last.finished)


@dataclass(slots=True)
class CompletionState:
    """One of a request's ``n`` completions.

    Attributes:
        request: the sequence that computes it now.
        ended: what those before it have come to, where it takes several: no other tokens are
            emitted.
        finish_reason: None while it runs.
        tensors: its stage outputs, once finished.
        num_emitted: how many of its tokens were in a delta.
    """

    request: Request
    ended: EndedSequences | None = None
    finish_reason: FinishReason | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    num_emitted: int = 0

    @classmethod
    def of(cls, request: Request) -> CompletionState:
        """By its first sequence."""
        return cls(request, EndedSequences.before(request))

    @property
    def first(self) -> Request:
        """Its first sequence."""
        return self.request if self.ended is None else self.ended.first

    @property
    def times(self) -> RequestTimes:
        """From the beginning of the first sequence on."""
        times = self.request.times
        return times if self.ended is None else self.ended.times(times)

    def output(self, index: int) -> CompletionOutput:
        """All of it now; takes the text's growth since the last call."""
        now, ended = self.request, self.ended
        text = now.text if ended is None else ended.text
        logprobs = now.logprobs if ended is None else ended.logprobs
        delta = text.take_delta()
        return CompletionOutput(
            index=index,
            text=text.text,
            delta=delta,
            token_ids=tuple(now.output_token_ids if ended is None else ended.token_ids),
            logprobs=tuple(logprobs) if now.params.logprobs is not None else None,
            finish_reason=self.finish_reason,
            tensors=self.tensors,
            windows=self.windows,
        )

    def delta(self, index: int) -> CompletionDelta:
        """What is new since the last call."""
        now, ended, emitted = self.request, self.ended, self.num_emitted
        if ended is None:
            text, logprobs = now.text, now.logprobs
            token_ids = tuple(now.token_ids[now.num_prompt_tokens + emitted :])
        else:
            text, logprobs = ended.text, ended.logprobs
            token_ids = tuple(ended.token_ids[emitted:])
        self.num_emitted += len(token_ids)
        new_logprobs = None if now.params.logprobs is None else tuple(logprobs[emitted:])
        return CompletionDelta(
            index, text.take_delta(), token_ids, new_logprobs, self.finish_reason
        )

    @property
    def windows(self) -> tuple[WindowStart, ...]:
        """Of a recording that takes several, those that have ended."""
        return () if self.ended is None else tuple(self.ended.windows)


@dataclass(slots=True)
class RequestGroup:
    """A user's request: its completions run as sequences of their own and share a prompt.

    Attributes:
        request_id: the user's.
        completions: in order of their index.
        has_prompt_ids: whether the prompt came as ids or text, not as embeddings.
        error: why the request failed, or None.
    """

    request_id: str
    completions: tuple[CompletionState, ...]
    has_prompt_ids: bool
    error: str | None = None
    _prompt_ids: tuple[int, ...] = ()
    _num_preemptions: int = -1

    @classmethod
    def of(cls, request_id: str, requests: Sequence[Request]) -> RequestGroup:
        """Group the sequences that :class:`InputProcessor` made of one request."""
        return cls(
            request_id,
            tuple(map(CompletionState.of, requests)),
            has_prompt_ids=requests[0].prompt_embeds is None,
        )

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(completion.finish_reason is not None for completion in self.completions)

    def finish(self, request: Request, reason: FinishReason, tensors: Mapping[str, Tensor]) -> None:
        """Record the end of one completion."""
        completion = self.completion_of(request)
        completion.finish_reason = reason
        completion.tensors = tensors
        text = request.text if completion.ended is None else completion.ended.text
        text.finish()
        request.times.finished = time.monotonic()

    def completion_of(self, request: Request) -> CompletionState:
        """The completion that a sequence computes now."""
        return next(each for each in self.completions if each.request is request)

    def output(self) -> RequestOutput:
        """All of it now."""
        first = self.completions[0].first
        encoder = first.encoder_input
        return RequestOutput(
            request_id=self.request_id,
            outputs=tuple(c.output(index) for index, c in enumerate(self.completions)),
            finished=self.finished,
            num_prompt_tokens=first.num_prompt_tokens,
            num_cached_tokens=min(first.num_cached_tokens or 0, first.num_prompt_tokens),
            error=self.error,
            prompt_token_ids=self._prompt_token_ids(first),
            encoder_prompt_token_ids=self._encoder_prompt_token_ids(first),
            encoder_prompt=None if encoder is None else encoder.text,
            metrics=self._metrics(self._count_preemptions()),
        )

    def delta(self) -> OutputDelta:
        """What is new since the last call."""
        lead, finished = self.completions[0], self.finished
        first, new = lead.first, lead.delta(0)
        others: tuple[CompletionDelta, ...] = ()
        if len(self.completions) > 1:
            deltas = (each.delta(index) for index, each in enumerate(self.completions[1:], 1))
            others = tuple(each for each in deltas if each.token_ids or each.finish_reason)
        num_preemptions = self._count_preemptions()
        metrics, encoder_ids = None, None
        if finished or others or num_preemptions != self._num_preemptions:
            metrics = self._metrics(num_preemptions)
            encoder_ids = self._encoder_prompt_token_ids(first)
            self._num_preemptions = num_preemptions
        return OutputDelta(
            self.request_id,
            finished,
            new.text if lead.request.text.has_tokenizer else None,
            new.token_ids,
            new.logprobs,
            new.finish_reason,
            len(self.completions),
            others,
            error=self.error,
            num_prompt_tokens=first.num_prompt_tokens,
            num_cached_tokens=min(first.num_cached_tokens or 0, first.num_prompt_tokens),
            prompt_token_ids=self._prompt_token_ids(first) if finished else (),
            encoder_prompt_token_ids=encoder_ids,
            tensors=lead.tensors if finished else {},
            windows=lead.windows,
            metrics=metrics,
        )

    def _prompt_token_ids(self, first: Request) -> tuple[int, ...]:
        if self.has_prompt_ids and len(self._prompt_ids) != first.num_prompt_tokens:
            self._prompt_ids = tuple(first.token_ids[: first.num_prompt_tokens])
        return self._prompt_ids

    @staticmethod
    def _encoder_prompt_token_ids(first: Request) -> tuple[int, ...] | None:
        encoder = first.encoder_input
        return (encoder and encoder.token_ids) or None

    def _count_preemptions(self) -> int:
        return sum(completion.request.num_preemptions for completion in self.completions)

    def _metrics(self, num_preemptions: int) -> RequestMetrics:
        slowest = max(
            (completion.times for completion in self.completions),
            key=lambda times: times.finished or float("inf"),
        )
        return slowest.metrics(num_preemptions, self.completions[0].first.prefix_miss)
