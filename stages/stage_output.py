"""Outputs of a stage for one request: cumulative for users, transferred as deltas internally.

::

    engine ── OutputDelta ──► stage ──► worker ──► orchestrator ──► OutputAccumulator ── StageOutput

External kinds of stages may return cumulative outputs; :func:`delta_since` converts them to deltas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from engine import FinishReason, RequestMetrics, TokenLogprobs, TranscriptionWindow, Waveform
from engine.interface.hints import Tensors
from engine.interface.outputs import CompletionDelta, OutputDelta, failure_of


class Completion(NamedTuple):
    """One of the ``SamplingParams.n`` completions of a prompt, partial or finished.

    Attributes:
        text: generated text; empty from a model without a tokenizer.
        token_ids: generated ids.
        finish_reason: None while it is unfinished.
        logprobs: per generated token, if requested.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class StageOutput:
    """Output of a stage for a request, partial or finished.

    Attributes:
        stage: the stage's name.
        finished: True if this is the stage's last output for this request.
        text: generated text so far; None from a stage that generates no text.
        delta: addition to ``text`` since the previous output.
        token_ids: generated ids so far.
        finish_reason: None while it is unfinished.
        error: message if the request failed; other requests are not affected.
        num_prompt_tokens: number of tokens of the stage's input.
        num_cached_tokens: number of these tokens that were cache hits.
        encoder_prompt_token_ids: input of an encoder-decoder model's text encoder; else None.
        prompt_token_ids: ids of the stage's input, when finished, with those that the model chose
            itself, such as a speech model's language; empty for embeddings.
        tensors: ``name -> (num_tokens, ...)`` when finished: for an autoregressive stage one row
            per token whose forward pass has run; ``pooled`` is ``(D,)``. On the CPU; only custom
            kinds of stages may leave some on their GPU.
        logprobs: per generated token, if requested.
        completions: all ``SamplingParams.n`` completions of a stage that generates tokens; the
            fields above are those of the first.
        audio: the whole audio of a stage that generates audio, when finished; else None.
        audio_delta: audio that such a stage has generated since the previous output; else None.
        metrics: times.
        windows: start of each window, if a recording needed several windows of a speech model.
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
    tensors: Tensors = field(default_factory=dict)
    logprobs: tuple[TokenLogprobs, ...] | None = None
    completions: tuple[Completion, ...] = ()
    audio: Waveform | None = None
    audio_delta: Waveform | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    windows: tuple[TranscriptionWindow, ...] = ()

    @property
    def failure(self) -> str | None:
        """Reason why the request failed; None if it is unfinished or has succeeded."""
        return failure_of(self.finished, self.error, self.finish_reason)


@dataclass(slots=True)
class _Completion:
    """A partial completion."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None

    def add(self, new: OutputDelta | CompletionDelta) -> None:
        if new.text:
            self.text.append(new.text)
        self.token_ids += new.token_ids
        if new.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += new.logprobs
        if new.finish_reason is not None:
            self.finish_reason = new.finish_reason

    def completion(self) -> Completion:
        logprobs = None if self.logprobs is None else tuple(self.logprobs)
        return Completion("".join(self.text), tuple(self.token_ids), self.finish_reason, logprobs)


class OutputAccumulator:
    """Accumulates the deltas of one request in one stage.

    Adding a delta is linear in its size; creating an output is linear in the size of the output.
    The ``token_ids`` of the first completion must not be modified.
    """

    def __init__(self, request_id: str, stage: str) -> None:
        self.request_id, self.stage = request_id, stage
        self._completions = [_Completion()]
        self.finished = False
        self.token_ids = self._completions[0].token_ids
        self._num_completions = 0
        self._has_text = False
        self._audio: list[Waveform] = []
        # The ``delta`` and ``audio_delta`` of the next output.
        self._new_text: list[str] = []
        self._new_audio: list[Waveform] = []
        # The latest values of other fields.
        self._fields: dict[str, Any] = {}

    def add(self, delta: OutputDelta) -> None:
        """Add a delta; raise ``ValueError`` if the sampling rate of its audio has changed."""
        if delta.audio is not None:
            if self._audio and delta.audio.sampling_rate != self._audio[0].sampling_rate:
                raise ValueError(
                    f"sound of {self._audio[0].sampling_rate} samples per second cannot be "
                    f"followed by sound of {delta.audio.sampling_rate}"
                )
            self._audio.append(delta.audio)
            self._new_audio.append(delta.audio)
        self.finished |= delta.finished
        self._completions[0].add(delta)
        self._num_completions = max(self._num_completions, delta.num_completions)
        for other in delta.others:
            while len(self._completions) <= other.index:
                self._completions.append(_Completion())
            self._completions[other.index].add(other)
        if delta.text is not None:
            self._has_text = True
            self._new_text.append(delta.text)
        if delta.num_prompt_tokens:
            self._fields["num_prompt_tokens"] = delta.num_prompt_tokens
            self._fields["num_cached_tokens"] = delta.num_cached_tokens
        for name in _LATEST_FIELDS if delta.finished or delta.metrics or delta.windows else ():
            value = getattr(delta, name)
            if value is not None and value != ():
                self._fields[name] = value

    def skip(self) -> None:
        """Mark everything so far as delivered: the next output's delta does not include it."""
        self._new_text.clear()
        self._new_audio.clear()

    def output(self) -> StageOutput:
        """Create the cumulative output; its deltas are relative to the previous call."""
        completions = self._all_completions()
        first, fields = completions[0], self._fields
        new_text, self._new_text = "".join(self._new_text), []
        new_audio, self._new_audio = _concatenate(self._new_audio), []
        failure = failure_of(self.finished, fields.get("error"), first.finish_reason)
        whole = fields.get("whole_audio")
        if whole is None and self.finished and failure is None:
            whole = _concatenate(self._audio)
        kept = {name: value for name, value in fields.items() if name != "whole_audio"}
        return StageOutput(
            self.request_id,
            self.stage,
            self.finished,
            text=first.text if self._has_text else None,
            delta=new_text,
            token_ids=first.token_ids,
            finish_reason=first.finish_reason,
            logprobs=first.logprobs,
            completions=completions if self._num_completions else (),
            audio=whole,
            audio_delta=new_audio,
            **kept,
        )

    def sound_from(self, num_samples: int) -> Waveform | None:
        """Return the audio so far after the first ``num_samples`` samples; None if none is left."""
        whole = _concatenate(self._audio)
        if whole is None or whole.samples.shape[0] <= num_samples:
            return None
        return replace(whole, samples=whole.samples[num_samples:])

    def as_delta(self) -> OutputDelta:
        """Create one delta of everything so far."""
        first, *others = self._all_completions()
        return OutputDelta(
            self.request_id,
            self.finished,
            first.text if self._has_text else None,
            first.token_ids,
            first.logprobs,
            first.finish_reason,
            self._num_completions,
            tuple(
                CompletionDelta(index, each.text, each.token_ids, each.logprobs, each.finish_reason)
                for index, each in enumerate(others, 1)
            ),
            _concatenate(self._audio),
            **self._fields,
        )

    def _all_completions(self) -> tuple[Completion, ...]:
        missing = self._num_completions - len(self._completions)
        self._completions += [_Completion() for _ in range(missing)]
        return tuple(each.completion() for each in self._completions)


_LATEST_FIELDS = (
    "error",
    "prompt_token_ids",
    "encoder_prompt_token_ids",
    "tensors",
    "windows",
    "metrics",
    "whole_audio",
)


def _concatenate(pieces: Sequence[Waveform]) -> Waveform | None:
    if len(pieces) < 2:
        return pieces[0] if pieces else None
    return pieces[0].followed_by(*pieces[1:])


def delta_since(output: StageOutput, before: StageOutput | None) -> OutputDelta:
    """Compute the delta between cumulative outputs; ``ValueError`` if text or ids do not extend."""
    last = before or StageOutput(output.request_id, output.stage, finished=False)
    text = None
    if output.text is not None:
        text = _suffix("text", output.text, last.text or "")
    others = []
    for index, each in enumerate(output.completions[1:], 1):
        old = last.completions[index] if index < len(last.completions) else _EMPTY_COMPLETION
        if each != old:
            others.append(
                CompletionDelta(
                    index,
                    _suffix("text", each.text, old.text),
                    _suffix("token_ids", each.token_ids, old.token_ids),
                    None if each.logprobs is None else each.logprobs[len(old.logprobs or ()) :],
                    each.finish_reason,
                )
            )
    return OutputDelta(
        output.request_id,
        output.finished,
        text,
        _suffix("token_ids", output.token_ids, last.token_ids),
        None if output.logprobs is None else output.logprobs[len(last.logprobs or ()) :],
        output.finish_reason,
        len(output.completions),
        tuple(others),
        output.audio_delta,
        output.audio,
        output.error,
        output.num_prompt_tokens,
        output.num_cached_tokens,
        output.prompt_token_ids,
        output.encoder_prompt_token_ids,
        output.tensors,
        output.windows,
        output.metrics,
    )


_EMPTY_COMPLETION = Completion("", (), None)
_T = TypeVar("_T", str, tuple[int, ...])


def _suffix(name: str, now: _T, before: _T) -> _T:
    if now[: len(before)] != before:
        raise ValueError(
            f"its {name} must begin with what its last output had, {before!r:.80}, got {now!r:.80}"
        )
    return now[len(before) :]
