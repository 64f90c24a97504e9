"""What an engine hands back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from engine.interface.deferred import deferrable

if TYPE_CHECKING:
    from torch import Tensor

    from engine.interface.waveform import Waveform

__all__ = [
    "CompletionOutput",
    "EncoderOutput",
    "FinishReason",
    "GeneratorOutput",
    "RequestMetrics",
    "RequestOutput",
    "TokenLogprobs",
    "WindowStart",
]


class FinishReason(StrEnum):
    """Why a request ended: a stop token or string, its length, the user, or a failure."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one generated position, of the model's raw distribution.

    Attributes:
        token_id: the chosen token.
        logprob: its log-probability.
        top: the likeliest tokens with their log-probabilities, likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request, in seconds; a time that has not come is None.

    Attributes:
        queue_s: from arrival to the first step that ran it.
        first_token_s: from arrival to the first generated token.
        total_s: from arrival to the end.
        num_preemptions: how often it had to give its blocks back.
        prefix_miss: in a word, why no more of its prompt was hit in the prefix cache; see
            :data:`prefix_cache.PrefixMiss`. None if all that can be hit was, or nothing is cached.
    """

    queue_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None
    num_preemptions: int = 0
    prefix_miss: str | None = None


class WindowStart(NamedTuple):
    """Where one window of an input begins that took several: timestamps count from there.

    Attributes:
        first_token: place of its first token among all that were generated.
        begin_s: its place in the input, in seconds.
    """

    first_token: int
    begin_s: float


@deferrable("text", "token_ids", "logprobs")
@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt, as far as it has come.

    Attributes:
        index: which of the ``n`` completions.
        text: all text so far; never half a character, never part of a stop string.
        delta: what ``text`` grew by since the output before.
        token_ids: all generated ids so far, a stop token included.
        logprobs: one entry per generated token, or None when not asked for.
        finish_reason: None while it goes on.
        tensors: ``name -> (rows, ...)`` on the CPU: one row for every token whose forward pass
            has run (the prompt and all generated tokens but the last). Only when finished.
        windows: of a recording that takes several, those that have ended; else none.
    """

    index: int
    text: str
    delta: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    windows: tuple[WindowStart, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The state of one request after a step that moved it.

    Attributes:
        request_id: as given to ``add_request``.
        outputs: one entry per completion (``SamplingParams.n``), in order of their index.
        finished: whether every completion has ended; nothing follows after that.
        num_prompt_tokens: tokens (or embedding rows) of the prompt.
        num_cached_tokens: prompt tokens whose computation the prefix cache saved.
        error: the message of a request that failed alone, with ``FinishReason.ERROR``.
        prompt_token_ids: the prompt's ids (the whole decoder prompt's); empty for embeddings.
        encoder_prompt_token_ids: what an encoder-decoder's encoder read, if it was text.
        encoder_prompt: the text that they came from, if it was text.
        metrics: times.
    """

    request_id: str
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    error: str | None = None
    prompt_token_ids: tuple[int, ...] = ()
    encoder_prompt_token_ids: tuple[int, ...] | None = None
    encoder_prompt: str | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)


@dataclass(frozen=True, slots=True)
class EncoderOutput:
    """The result of one input of an encoder engine. There are no partial ones.

    Attributes:
        request_id: as given to ``add_request``.
        finished: always True; the field lets callers treat all engines alike.
        tensors: on the CPU; ``hidden_states`` is ``(num_prompt_tokens, D)``, ``pooled`` ``(D,)``.
            Empty when the request failed.
        num_prompt_tokens: tokens (or embedding rows) of the input.
        num_cached_tokens: all of them when the cache had the input, else 0.
        prompt_token_ids: the input's ids; empty for embeddings.
        error: why the request failed; it failed alone.
        metrics: times; there is no first token.
    """

    request_id: str
    finished: bool
    tensors: Mapping[str, Tensor]
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_token_ids: tuple[int, ...] = ()
    error: str | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)


@dataclass(frozen=True, slots=True)
class GeneratorOutput:
    """What an utterance has become, so far or in the end.

    Attributes:
        request_id: as given to ``add_request``.
        finished: nothing follows.
        delta: what was made since the output before; None for a request that failed.
        waveform: all of it, when finished; None before and for a request that failed.
        num_codes: codes that came so far.
        error: why the request failed; it failed alone.
        is_cut_off: whether its last codes said that a limit of length cut them off.
        metrics: times; there is no first token.
    """

    request_id: str
    finished: bool
    delta: Waveform | None
    waveform: Waveform | None
    num_codes: int
    error: str | None = None
    is_cut_off: bool = False
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
