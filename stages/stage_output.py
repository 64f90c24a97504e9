"""What a stage puts out of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from engine import FinishReason, RequestMetrics, TokenLogprobs, WindowStart
from engine.interface.deferred import deferrable

if TYPE_CHECKING:
    from torch import Tensor

    from engine import Waveform

__all__ = ["Completion", "StageOutput"]


class Completion(NamedTuple):
    """One of the ``SamplingParams.n`` answers to a prompt, so far or in the end.

    Attributes:
        text: generated text; empty from a model without a tokenizer.
        token_ids: generated ids.
        finish_reason: None while it goes on.
        logprobs: per generated token, when asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] | None = None


@deferrable("text", "token_ids", "logprobs", "completions")
@dataclass(frozen=True)
class StageOutput:
    """What a stage has made of a request, so far or in the end.

    Attributes:
        request_id: the request.
        stage: the stage's name.
        finished: nothing follows from this stage for this request.
        text: generated text so far; None from a stage that makes no text.
        delta: what ``text`` grew by.
        token_ids: generated ids so far.
        finish_reason: None while it goes on.
        error: message of a request that failed; it failed alone.
        num_prompt_tokens: tokens of the stage's input.
        num_cached_tokens: of these, how many the cache saved computing.
        encoder_prompt_token_ids: what an encoder-decoder model's text encoder read; else None.
        prompt_token_ids: ids of the stage's input, when finished, with those that the model chose
            itself, such as a speech model's language; empty for embeddings.
        tensors: ``name -> (num_tokens, ...)`` when finished: for an autoregressive stage one row
            per token whose forward pass has run; ``pooled`` is ``(D,)``. On the CPU, but that a
            kind of stage of your own may leave some on its GPU.
        logprobs: per generated token, when asked for.
        completions: from a stage that generates tokens, all ``SamplingParams.n`` of them; the
            fields above are the first one's.
        audio: from a stage that makes sound, the whole of it, when finished; else None.
        audio_delta: what a stage that makes sound has made since the output before; else None.
        metrics: times.
        windows: of a recording that took several windows of a speech model, where each begins.
    """

    request_id: str
    stage: str
    finished: bool
    text: str | None = None
    delta: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    encoder_prompt_token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] = ()
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    logprobs: tuple[TokenLogprobs, ...] | None = None
    completions: tuple[Completion, ...] = ()
    audio: Waveform | None = None
    audio_delta: Waveform | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    windows: tuple[WindowStart, ...] = ()

    @property
    def failure(self) -> str | None:
        """Why nothing more comes of the request; None while it goes on, and when it is done."""
        if not self.finished:
            return None
        if self.error is None and self.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            return f"it ended the request early ({self.finish_reason})"
        return self.error
