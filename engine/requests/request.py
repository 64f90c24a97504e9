"""One sequence on its way through an engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from torch import Tensor

from engine.interface.outputs import RequestMetrics, TokenLogprobs
from engine.interface.sampling_params import SamplingParams
from engine.requests.encoder_input import (
    Continuation,
    EncoderInput,
    EncoderView,
    MultiModalInput,
    PromptChoice,
    PromptPositions,
    StreamedRows,
)
from engine.sampling.sampler import SamplingState
from engine.text.stop_checker import CompletionText
from prefix_cache import (
    BlockHash,
    ContentSpan,
    EncoderBlocks,
    PrefixMiss,
    extend_block_hashes,
)

__all__ = ["Request", "RequestStatus", "RequestTimes"]


class RequestStatus(Enum):
    """Where a request is. A preempted request waits again, its tokens kept, or is swapped out."""

    WAITING = auto()
    RUNNING = auto()
    SWAPPED = auto()
    FINISHED = auto()


@dataclass(slots=True)
class RequestTimes:
    """Clock readings of one request, in seconds of ``time.monotonic``."""

    arrival: float = field(default_factory=time.monotonic)
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None

    def metrics(self, num_preemptions: int, prefix_miss: PrefixMiss | None) -> RequestMetrics:
        """The same as durations since the arrival."""

        def since_arrival(moment: float | None) -> float | None:
            return None if moment is None else moment - self.arrival

        return RequestMetrics(
            queue_s=since_arrival(self.first_scheduled),
            first_token_s=since_arrival(self.first_token),
            total_s=since_arrival(self.finished),
            num_preemptions=num_preemptions,
            prefix_miss=prefix_miss,
        )


@dataclass(slots=True, eq=False)
class Request:
    """One sequence: its tokens, how far they are computed, and what it needs to go on.

    ::

        token_ids   | prompt ............ | generated ... | last |
                    |<- num_computed_tokens ------------->|      |
                    |<- num_cached_tokens ->| (of the prompt, at admission)
        the last token is the input of the next forward pass

    Attributes:
        request_id: unique among the engine's live requests.
        token_ids: prompt and output. Positions that ``prompt_embeds`` covers hold 0.
        num_prompt_tokens: how many of them are the prompt.
        prompt_embeds: ``(num_prompt_tokens, hidden_size)`` in the model's type, or None.
        params: how tokens are chosen.
        max_num_tokens: prompt and output together stop here.
        priority: lower first.
        arrival_index: order among equal priorities.
        cache_salt: blocks are shared only within one salt.
        sampling: this request's random source and token counts.
        text: the output as text, and the rule that ends it.
        spans: what block hashes cover beside the token ids.
        encoder_input: an encoder-decoder's encoder gets it; ``token_ids`` are then the decoder's.
        encoder_view: which rows of the encoder's output its tokens see.
        encoder_blocks: the encoder's output as cross-attention keeps it.
        multimodal_inputs: images and the like, in the order of their places in the prompt.
        positions: on several axes, where tokens are placed so; None where places are indices.
        streamed_rows: rows beside the tokens, in models that want them. They may come while the
            request runs, which it does only as far as they are known.
        is_paused: whether it rests, with what it holds, until its caller lets it go on.
        continuation: what follows when the sequence has ended; None: the completion ends with it.
        prompt_choice: how the prompt goes on, until the model has chosen; None: it is known whole.
        alone_until: it shares no step before so many tokens are computed: a shared one failed.
        block_hashes: of the blocks whose tokens and rows are all known; extended on demand.
        prefix_miss: why no more of it was cached when it was first let in.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    prompt_embeds: Tensor | None
    params: SamplingParams
    max_num_tokens: int
    priority: int
    arrival_index: int
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
    num_preemptions: int = 0
    times: RequestTimes = field(default_factory=RequestTimes)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far."""
        return len(self.token_ids)

    @property
    def has_rows(self) -> bool:
        """Whether anything stands in the place of its tokens' embeddings, or beside them."""
        given = self.prompt_embeds is not None or self.streamed_rows is not None
        return given or bool(self.multimodal_inputs)

    @property
    def num_known_tokens(self) -> int:
        """Leading tokens that can run: those that need no row which is still to come."""
        if self.streamed_rows is None:
            return self.num_tokens
        return self.streamed_rows.num_known(self.num_tokens)

    @property
    def needs_input(self) -> bool:
        """Whether it cannot get past its newest token before more rows come."""
        return self.num_known_tokens < self.num_tokens

    @property
    def is_isolated(self) -> bool:
        """Whether it has to run alone, because it may be what made a step fail."""
        return self.num_computed_tokens < self.alone_until

    def can_run_from(self, num_computed_tokens: int) -> bool:
        """Whether it has a token to run, if so many are computed."""
        return not self.is_paused and num_computed_tokens < self.num_known_tokens

    @property
    def next_sampling(self) -> SamplingState:
        """What the sampler goes by for the next token."""
        return self.sampling if self.prompt_choice is None else self.prompt_choice.sampling

    @property
    def output_token_ids(self) -> Sequence[int]:
        """Generated ids."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def queue_key(self) -> tuple[int, int]:
        """Sort key of the queues: priority first, then first come, first served."""
        return (self.priority, self.arrival_index)

    @property
    def num_position_axes(self) -> int:
        """Numbers that place one of its tokens."""
        return 1 if self.positions is None else self.positions.table.shape[0]

    @property
    def num_visible_encoder_tokens(self) -> int:
        """Rows of the encoder's output that this step's tokens see."""
        view = self.encoder_view
        if view is None:
            return 0
        return view.rows_before if self.num_computed_tokens < view.start else view.rows

    def clip_to_view(self, num_tokens: int) -> int:
        """How many of the next ``num_tokens`` tokens see the same rows of the encoder's output."""
        view = self.encoder_view
        if view is None or self.num_computed_tokens >= view.start:
            return num_tokens
        return min(num_tokens, view.start - self.num_computed_tokens)

    def complete_prompt(self, token_id: int) -> tuple[int, ...]:
        """Let the prompt go on by a token that the model chose; returns all that came to it.

        Raises:
            RuntimeError: the prompt is known whole.
        """
        if self.prompt_choice is None:
            raise RuntimeError(f"the prompt of request {self.request_id!r} is known whole")
        new = (token_id, *self.prompt_choice.then)
        self.token_ids.extend(new)
        self.num_prompt_tokens += len(new)
        self.sampling.extend_prompt(new)
        self.prompt_choice = None
        return new

    def begin_anew(self) -> None:
        """Forget what was computed; what was generated and told stays."""
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.alone_until = 0
        self.block_hashes.clear()

    def append(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Take a sampled token."""
        self.token_ids.append(token_id)
        self.sampling.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)

    def extend_hashes(self, block_size: int) -> None:
        """Hash the blocks that have become full since the last call."""
        num_known, first = self.num_known_tokens, len(self.block_hashes) * block_size
        if num_known - first < block_size:
            return
        rows = () if self.streamed_rows is None else self.streamed_rows.spans(first, num_known)
        extend_block_hashes(
            self.block_hashes,
            self.token_ids if num_known == self.num_tokens else self.token_ids[:num_known],
            block_size,
            spans=(*self.spans, *rows),
            salt=self.cache_salt,
        )
