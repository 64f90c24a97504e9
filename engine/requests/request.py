"""State of one sequence in an engine, and of the user request that it belongs to."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

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
    TranscriptionWindow,
)
from engine.interface.sampling_params import SamplingParams
from engine.requests.encoder_input import (
    EncoderInput,
    EncoderView,
    MultiModalInput,
    PromptChoice,
    PromptPositions,
    StreamedRows,
)
from engine.sampling.sampler import Judgement, SamplingState
from engine.text.stop_checker import CompletionText
from prefix_cache import (
    BlockHash,
    ContentSpan,
    EncoderBlocks,
    PrefixMiss,
    content_hash,
    extend_block_hashes,
    partial_block_hash,
)


class RequestStatus(Enum):
    """State of a request. A preempted one waits again with its tokens, or is swapped out."""

    WAITING = auto()
    RUNNING = auto()
    SWAPPED = auto()
    FINISHED = auto()


@dataclass(slots=True)
class RequestTimes:
    """Timestamps of one request, in seconds of ``time.monotonic``."""

    arrival: float = field(default_factory=time.monotonic)
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(slots=True, eq=False)
class Request:
    """Sequence with its tokens, its progress, and the inputs it needs to continue.

    ::

        token_ids   | prompt ............ | generated ... | last |
                    |<- num_computed_tokens ------------->|      |
                    |<- num_cached_tokens ->| (of the prompt, at admission)
        the last token is the input of the next forward pass

    Attributes:
        request_id: id that is unique among the engine's live requests.
        token_ids: prompt and output. Positions covered by ``prompt_embeds`` hold 0.
        prompt_embeds: ``(num_prompt_tokens, hidden_size)`` in the model's dtype, or None.
        max_num_tokens: maximum length of prompt and output together.
        queue_key: sort key of the queues: priority, lower first, then order of arrival.
        text: the output as text, and the rule that ends it.
        spans: content besides the token ids that block hashes cover.
        encoder_input: encoder input of an encoder-decoder; ``token_ids`` are then the decoder's.
        multimodal_inputs: multimodal items, in prompt order.
        positions: positions on several axes; None if positions are indices.
        streamed_rows: rows that accompany the tokens in models that need them. They may arrive
            while the request is running, which it does only as far as they are known.
        is_paused: true if it rests, keeping what it holds, until its caller resumes it.
        continuation: what follows the end of the sequence; None: the completion ends with it.
        prompt_choice: pending continuation of the prompt; None if the prompt is complete.
        alone_until: number of computed tokens before which it runs alone, after a shared step
            failed.
        block_hashes: hashes of blocks whose tokens and rows are all known; extended on demand.
        prefix_miss: reason why no longer prefix was cached on first admission.
        further_codes: in models with several codebooks, codes sampled with each generated token.
        judgements: for judged text, judgements of all chosen tokens, including the prompt's.
        queries: for aligned text, queries of cross-attention heads by token position.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    prompt_embeds: Tensor | None
    params: SamplingParams
    max_num_tokens: int
    queue_key: tuple[int, int]
    cache_salt: str | None
    sampling: SamplingState
    text: CompletionText
    spans: tuple[ContentSpan, ...] = ()
    encoder_input: EncoderInput | None = None
    encoder_view: EncoderView | None = None
    encoder_blocks: EncoderBlocks | None = None
    multimodal_inputs: tuple[MultiModalInput, ...] = ()
    positions: PromptPositions | None = None
    streamed_rows: StreamedRows | None = None
    prompt_choice: PromptChoice | None = None
    continuation: Continuation | None = None
    is_paused: bool = False
    alone_until: int = 0
    block_hashes: list[BlockHash] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    prefix_miss: PrefixMiss | None = None
    further_codes: list[tuple[int, ...]] = field(default_factory=list)
    num_preemptions: int = 0
    times: RequestTimes = field(default_factory=RequestTimes)
    judgements: list[Judgement] = field(default_factory=list)
    queries: dict[int, Tensor] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Number of tokens known so far."""
        return len(self.token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Number of leading tokens that can run, because their rows have arrived."""
        num_tokens, rows = len(self.token_ids), self.streamed_rows
        return num_tokens if rows is None else rows.num_known(num_tokens)

    @property
    def needs_input(self) -> bool:
        """True if its newest token cannot run before more rows arrive."""
        return self.num_known_tokens < self.num_tokens

    @property
    def is_isolated(self) -> bool:
        """True if it must run alone, because it may have caused a step to fail."""
        return self.num_computed_tokens < self.alone_until

    def can_run_from(self, num_computed_tokens: int) -> bool:
        """Return True if it has a token to run after ``num_computed_tokens`` computed ones."""
        return not self.is_paused and num_computed_tokens < self.num_known_tokens

    @property
    def next_sampling(self) -> SamplingState:
        """Sampling state for the next token."""
        return self.sampling if self.prompt_choice is None else self.prompt_choice.sampling

    @property
    def output_token_ids(self) -> Sequence[int]:
        """Ids of the generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_encoder_tokens(self) -> int:
        """Length of its encoder sequence; 0 without one."""
        return 0 if self.encoder_blocks is None else self.encoder_blocks.num_tokens

    @property
    def num_visible_encoder_tokens(self) -> int:
        """Number of rows of the encoder's output that are visible to this step's tokens."""
        view = self.encoder_view
        if view is None:
            return 0
        return view.rows_before if self.num_computed_tokens < view.start else view.rows

    def clip_chunk(self, num_tokens: int) -> int:
        """Return how many of the next ``num_tokens`` tokens may run together, possibly 0.

        They attend to the same encoder rows, and do not end inside a bidirectional item, because
        cached blocks of such an item must have attended to all of it.
        """
        first, view = self.num_computed_tokens, self.encoder_view
        if view is not None and first < view.start:
            num_tokens = min(num_tokens, view.start - first)
        for item in self.multimodal_inputs:
            if item.bidirectional and item.offset < first + num_tokens < item.end:
                return max(0, item.offset - first)
        return num_tokens

    def complete_prompt(self, token_id: int) -> tuple[int, ...]:
        """Extend the prompt by the token that the model chose; return all added tokens.

        Raises:
            RuntimeError: if the prompt is already complete.
        """
        if self.prompt_choice is None:
            raise RuntimeError(f"the prompt of request {self.request_id!r} is known whole")
        new = (token_id, *self.prompt_choice.then)
        self.token_ids.extend(new)
        self.num_prompt_tokens += len(new)
        self.sampling.extend_prompt(new)
        self.prompt_choice = None
        return new

    @property
    def is_aligned(self) -> bool:
        """True if its cross-attention is needed."""
        return self.continuation is not None and self.continuation.is_aligned

    @property
    def mean_score(self) -> float:
        """Mean log-probability of the generated tokens; see ``Judgement``."""
        scores = [each.score for each in self.judgements[-len(self.output_token_ids) :]]
        return sum(scores) / len(scores)

    def restart(self) -> None:
        """Forget what was computed, but keep generated and emitted tokens."""
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.alone_until = 0
        self.block_hashes.clear()

    def codes_of(self, start: int, stop: int) -> list[tuple[int, ...]]:
        """Return all codes of generated tokens in ``[start, stop)``; empty with one codebook."""
        if not self.further_codes:
            return []
        first = self.num_prompt_tokens
        further = self.further_codes[max(start - first, 0) : max(stop - first, 0)]
        ids = self.token_ids[max(start, first) : stop]
        return [(index, *codes) for index, codes in zip(ids, further, strict=False)]

    def append(
        self, token_id: int, logprobs: TokenLogprobs | None, codes: tuple[int, ...] = ()
    ) -> None:
        """Append a sampled token, and the codes that were sampled with it."""
        self.token_ids.append(token_id)
        if codes:
            self.further_codes.append(codes)
        self.sampling.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)

    def extend_hashes(self, block_size: int) -> None:
        """Hash the blocks that have become full since the last call."""
        num_known, first = self.num_known_tokens, len(self.block_hashes) * block_size
        if num_known - first < block_size:
            return
        stop = num_known // block_size * block_size
        extend_block_hashes(
            self.block_hashes,
            self.token_ids if self.streamed_rows is None else self.token_ids[:num_known],
            block_size,
            spans=self._spans(first, stop, block_size),
            salt=self.cache_salt,
        )

    def partial_hash(self, block_size: int, num_tokens: int) -> BlockHash | None:
        """Return the hash of the first ``num_tokens`` tokens, which end inside a block.

        Returns None if they end with a block, or are not all known.
        """
        first = num_tokens // block_size * block_size
        if first == num_tokens or num_tokens > self.num_known_tokens:
            return None
        self.extend_hashes(block_size)
        return partial_block_hash(
            self.block_hashes,
            self.token_ids[:num_tokens],
            block_size,
            spans=self._spans(first, num_tokens, block_size),
            salt=self.cache_salt,
        )

    def _spans(self, first: int, stop: int, block_size: int) -> tuple[ContentSpan, ...]:
        """Return the content besides token ids that hashes of blocks in ``[first, stop)`` cover."""
        streamed, begin = self.streamed_rows, max(first, self.num_prompt_tokens)
        rows = () if streamed is None else streamed.spans(first, stop, block_size)
        drawn = enumerate(self.codes_of(begin, stop), begin)
        codes = (ContentSpan("codes", at, 1, content_hash(torch.tensor(row))) for at, row in drawn)
        return (*self.spans, *rows, *codes)


@dataclass(frozen=True, slots=True)
class Sequel:
    """Continuation of a request after one of its sequences.

    Attributes:
        num_kept: number of leading generated tokens that are part of the output.
        window: description of the sequence in the output; None: the output omits the sequence.
        encoder_input: encoder input of the next sequence; None if there is none.
        continuation: what follows the next sequence.
    """

    num_kept: int
    window: TranscriptionWindow | None = None
    encoder_input: EncoderInput | None = None
    continuation: Continuation | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Continuation(ABC):
    """Processing of an encoder input that is longer than the window, one sequence per window.

    ::

        input     |<---- window ---->|
                          |<---- window ---->|           starts where the first one's text ended
        output    | kept  | dropped  |
                          | kept .......     |

    The kept tokens of a sequence are known when it has ended, and the request emits no others. A
    sequence may also be generated again, at another temperature.

    Attributes:
        temperature: temperature of the sequence; None: that of the request.
        judged_id: see ``SamplingState``.
        is_aligned: true if its cross-attention is needed.
        longest_prompt: maximum number of prompt tokens of any sequence.
    """

    temperature: float | None = None
    judged_id: int | None = None
    is_aligned: bool = False
    longest_prompt: int = 0

    @abstractmethod
    def opening(
        self, prompt_ids: Sequence[int], choice: PromptChoice | None = None
    ) -> tuple[list[int], PromptChoice | None]:
        """Return the known part of the sequence's prompt, and its continuation.

        Args:
            prompt_ids: ids of the usual prompt, or of the previous sequence.
        """

    @abstractmethod
    def follow(self, request: Request, reason: FinishReason, attention: Tensor | None) -> Sequel:
        """Return the sequel of a sequence that has generated at least one token.

        Args:
            attention: ``(heads, tokens except the last, encoder rows)``, if it is needed.
        """


@dataclass(slots=True)
class EndedSequences:
    """Kept tokens of the sequences that have ended, concatenated."""

    first: Request
    text: CompletionText
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    windows: list[TranscriptionWindow] = field(default_factory=list)
    _rows: dict[str, list[Tensor]] = field(default_factory=dict)

    def take_in(
        self,
        request: Request,
        num_kept: int,
        window: TranscriptionWindow,
        rows: Mapping[str, Tensor],
        encoder_rows: Mapping[str, Tensor],
    ) -> None:
        """Append the result of a sequence."""
        kept = request.output_token_ids[:num_kept]
        self.windows.append(window._replace(first_token=len(self.token_ids)))
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
        """Return the rows of all sequences, concatenated."""
        return {name: torch.cat(parts) for name, parts in self._rows.items()}


@dataclass(slots=True)
class CompletionState:
    """State of one of a request's ``n`` completions.

    Attributes:
        ended: results of its earlier sequences, if it has several; no other tokens are emitted.
        finish_reason: None while it is running.
    """

    request: Request
    ended: EndedSequences | None = None
    finish_reason: FinishReason | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    num_emitted: int = 0

    @classmethod
    def of(cls, request: Request) -> CompletionState:
        """Create a completion from its first sequence."""
        if request.continuation is None:
            return cls(request)
        return cls(request, EndedSequences(request, request.text.without_end()))

    @property
    def first(self) -> Request:
        """First sequence of the completion."""
        return self.request if self.ended is None else self.ended.first

    def output(self, index: int) -> CompletionOutput:
        """Return the whole output so far; consumes the text delta since the last call."""
        now, ended = self.request, self.ended
        source = ended or now
        delta = source.text.take_delta()
        return CompletionOutput(
            index=index,
            text=source.text.text,
            delta=delta,
            token_ids=tuple(now.output_token_ids if ended is None else ended.token_ids),
            logprobs=tuple(source.logprobs) if now.params.logprobs is not None else None,
            finish_reason=self.finish_reason,
            tensors=self.tensors,
            windows=self.windows,
        )

    def delta(self, index: int) -> CompletionDelta:
        """Return the output since the last call."""
        now, emitted = self.request, self.num_emitted
        source = self.ended or now
        begin = emitted + (now.num_prompt_tokens if source is now else 0)
        token_ids = tuple(source.token_ids[begin:])
        self.num_emitted += len(token_ids)
        logprobs = None if now.params.logprobs is None else tuple(source.logprobs[emitted:])
        text = source.text.take_delta()
        return CompletionDelta(index, text, token_ids, logprobs, self.finish_reason)

    @property
    def windows(self) -> tuple[TranscriptionWindow, ...]:
        """Finished windows of a recording that needs several."""
        return () if self.ended is None else tuple(self.ended.windows)


@dataclass(slots=True)
class RequestGroup:
    """User request whose completions run as separate sequences and share a prompt."""

    request_id: str
    completions: tuple[CompletionState, ...]
    error: str | None = None
    finished: bool = False
    _prompt_ids: tuple[int, ...] = ()
    _num_preemptions: int = -1

    def finish(self, request: Request, reason: FinishReason, tensors: Mapping[str, Tensor]) -> None:
        """Record the end of one completion."""
        completion = self.completion_of(request)
        completion.finish_reason = reason
        completion.tensors = tensors
        self.finished = all([each.finish_reason is not None for each in self.completions])
        (completion.ended or request).text.finish()
        request.times.finished = time.monotonic()

    def completion_of(self, request: Request) -> CompletionState:
        """Return the completion that a sequence belongs to."""
        for each in self.completions:
            if each.request is request:
                return each
        raise ValueError(f"request {request.request_id!r} computes no completion of this one")

    def output(self) -> RequestOutput:
        """Return the whole output so far."""
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
            encoder_prompt_token_ids=(encoder and encoder.token_ids) or None,
            encoder_prompt=None if encoder is None else encoder.text,
            metrics=self._metrics(),
        )

    def delta(self) -> OutputDelta:
        """Return the output since the last call."""
        lead, finished = self.completions[0], self.finished
        first = lead.first
        new = lead.delta(0)
        others: tuple[CompletionDelta, ...] = ()
        if len(self.completions) > 1:
            deltas = (each.delta(index) for index, each in enumerate(self.completions[1:], 1))
            others = tuple(each for each in deltas if each.token_ids or each.finish_reason)
        num_preemptions = sum([each.request.num_preemptions for each in self.completions])
        metrics, encoder_ids = None, None
        if finished or others or num_preemptions != self._num_preemptions:
            metrics = self._metrics()
            encoder_ids = (first.encoder_input and first.encoder_input.token_ids) or None
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
            windows=lead.windows if new.token_ids or finished else (),
            metrics=metrics,
        )

    def _prompt_token_ids(self, first: Request) -> tuple[int, ...]:
        if first.prompt_embeds is None and len(self._prompt_ids) != first.num_prompt_tokens:
            self._prompt_ids = tuple(first.token_ids[: first.num_prompt_tokens])
        return self._prompt_ids

    def _metrics(self) -> RequestMetrics:
        """Return times since arrival, of the first running or else the last finished completion."""
        num_preemptions, slowest = 0, self.completions[0]
        for each in self.completions:
            num_preemptions += each.request.num_preemptions
            end, latest = each.request.times.finished, slowest.request.times.finished
            if latest is not None and (end is None or end > latest):
                slowest = each
        times, finished = slowest.first.times, slowest.request.times.finished
        moments = (times.first_scheduled, times.first_token, finished)
        queue_s, first_token_s, total_s = [t if t is None else t - times.arrival for t in moments]
        miss = self.completions[0].first.prefix_miss
        return RequestMetrics(queue_s, first_token_s, total_s, num_preemptions, miss)
