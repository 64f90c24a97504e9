"""What an engine hands back."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from engine.interface.hints import Tensors
from engine.interface.waveform import Waveform

__all__ = [
    "CompletionDelta",
    "CompletionOutput",
    "EncoderOutput",
    "FinishReason",
    "GeneratorOutput",
    "OutputDelta",
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


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """What is new of one completion of several.

    Attributes:
        index: which of the ``n`` completions, from 1: the first one's are in the delta itself.
        text: new text.
        token_ids: new ids.
        logprobs: one entry per new token; None when not asked for.
        finish_reason: if it has ended.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What is new of one request: engines and stages emit these.

    Text is final: never half a character, never part of a stop string, never taken back. The sum of
    all deltas is the output.

    Attributes:
        request_id: as given to ``add_request``.
        finished: nothing follows.
        text: new text; None from what makes none.
        token_ids: new ids.
        logprobs: one entry per new token; None when not asked for.
        finish_reason: if the first completion has ended.
        num_completions: how many there are; 0 from what does not generate tokens.
        others: what is new of the completions after the first.
        audio: new sound.
        whole_audio: all sound, when finished, where it is not the sum of its pieces.
        error: the message of a request that failed.
        num_prompt_tokens: tokens of the input.
        num_cached_tokens: of these, how many the cache saved computing.
        prompt_token_ids: ids of the input, when finished.
        encoder_prompt_token_ids: what an encoder-decoder's encoder read, in the first delta.
        tensors: rows of all tokens, when finished.
        windows: those that have ended so far, when another one has.
        metrics: times, in the first and the last delta and when a count has changed; else None.
    """

    request_id: str
    finished: bool = False
    text: str | None = None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    num_completions: int = 0
    others: tuple[CompletionDelta, ...] = ()
    audio: Waveform | None = None
    whole_audio: Waveform | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    prompt_token_ids: tuple[int, ...] = ()
    encoder_prompt_token_ids: tuple[int, ...] | None = None
    tensors: Tensors = field(default_factory=dict)
    windows: tuple[WindowStart, ...] = ()
    metrics: RequestMetrics | None = None

    @property
    def failure(self) -> str | None:
        """Why nothing more comes of the request; None while it goes on, and when it is done."""
        return failure_of(self.finished, self.error, self.finish_reason)


def failure_of(finished: bool, error: str | None, reason: FinishReason | None) -> str | None:
    """Why a request has failed; None while it goes on, and when it is done."""
    if finished and error is None and reason in (FinishReason.ERROR, FinishReason.ABORT):
        return f"it ended the request early ({reason})"
    return error if finished else None


@dataclass(frozen=True, slots=True)
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
    tensors: Tensors = field(default_factory=dict)
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
    tensors: Tensors
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_token_ids: tuple[int, ...] = ()
    error: str | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    def as_delta(self) -> OutputDelta:
        """The one delta of the input."""
        return OutputDelta(
            self.request_id,
            finished=True,
            finish_reason=FinishReason.STOP if self.error is None else FinishReason.ERROR,
            error=self.error,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            tensors=self.tensors,
            metrics=self.metrics,
        )


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

    def as_delta(self) -> OutputDelta:
        """The same as a delta; the whole is the sum of its pieces, unless it has no sample."""
        reason = None
        if self.finished:
            reason = FinishReason.LENGTH if self.is_cut_off else FinishReason.STOP
        new, whole = self.delta, self.waveform
        return OutputDelta(
            self.request_id,
            self.finished,
            finish_reason=reason if self.error is None else FinishReason.ERROR,
            audio=new if new is not None and new.samples.shape[0] else None,
            whole_audio=whole if whole is not None and not whole.samples.shape[0] else None,
            error=self.error,
            num_prompt_tokens=self.num_codes,
            metrics=self.metrics,
        )
