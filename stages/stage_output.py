"""The output of a stage for one request: cumulative for users, as a sum of deltas inside.

::

    engine ── OutputDelta ──► stage ──► worker ──► orchestrator ──► OutputAccumulator ── StageOutput

A kind of stage from outside may return cumulative outputs; :func:`delta_since` turns them back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from engine import FinishReason, RequestMetrics, TokenLogprobs, TranscriptionWindow, Waveform
from engine.interface.hints import Tensors
from engine.interface.outputs import CompletionDelta, OutputDelta, failure_of


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


@dataclass(frozen=True, slots=True)
class StageOutput:
    """What a stage has made of a request, so far or in the end.

    Attributes:
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
    tensors: Tensors = field(default_factory=dict)
    logprobs: tuple[TokenLogprobs, ...] | None = None
    completions: tuple[Completion, ...] = ()
    audio: Waveform | None = None
    audio_delta: Waveform | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    windows: tuple[TranscriptionWindow, ...] = ()

    @property
    def failure(self) -> str | None:
        """Why nothing more comes of the request; None while it goes on, and when it is done."""
        return failure_of(self.finished, self.error, self.finish_reason)


@dataclass(slots=True)
class _Completion:
    """One completion, so far."""

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
    """Adds up the deltas of one request in one stage.

    To add a delta takes as long as it is large; to make an output takes as long as that is. Its
    ``token_ids``, of the first completion, are not to be changed.
    """

    def __init__(self, request_id: str, stage: str) -> None:
        self.request_id, self.stage = request_id, stage
        self._completions = [_Completion()]
        self.finished = False
        self.token_ids = self._completions[0].token_ids
        self._num_completions = 0
        self._has_text = False
        self._audio: list[Waveform] = []
        # What the next output has as its ``delta`` and ``audio_delta``.
        self._new_text: list[str] = []
        self._new_audio: list[Waveform] = []
        # Of other fields, what the last delta that had any said.
        self._fields: dict[str, Any] = {}

    def add(self, delta: OutputDelta) -> None:
        """Add what is new; ``ValueError``: the sampling rate of its sound has changed."""
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
        for name in _KEPT if delta.finished or delta.metrics or delta.windows else ():
            value = getattr(delta, name)
            if value is not None and value != ():
                self._fields[name] = value

    def skip(self) -> None:
        """Count what has come so far as delivered: the next output does not have it as new."""
        self._new_text.clear()
        self._new_audio.clear()

    def output(self) -> StageOutput:
        """All of it so far; new in it is what came since this was last called."""
        completions = self._all_completions()
        first, fields = completions[0], self._fields
        new_text, self._new_text = "".join(self._new_text), []
        new_audio, self._new_audio = _joined(self._new_audio), []
        failure = failure_of(self.finished, fields.get("error"), first.finish_reason)
        whole = fields.get("whole_audio")
        if whole is None and self.finished and failure is None:
            whole = _joined(self._audio)
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
        """The sound so far, but for its first samples; None if there is no more."""
        whole = _joined(self._audio)
        if whole is None or whole.samples.shape[0] <= num_samples:
            return None
        return replace(whole, samples=whole.samples[num_samples:])

    def as_delta(self) -> OutputDelta:
        """All of it so far as one delta."""
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
            _joined(self._audio),
            **self._fields,
        )

    def _all_completions(self) -> tuple[Completion, ...]:
        missing = self._num_completions - len(self._completions)
        self._completions += [_Completion() for _ in range(missing)]
        return tuple(each.completion() for each in self._completions)


_KEPT = (
    "error",
    "prompt_token_ids",
    "encoder_prompt_token_ids",
    "tensors",
    "windows",
    "metrics",
    "whole_audio",
)


def _joined(pieces: Sequence[Waveform]) -> Waveform | None:
    if len(pieces) < 2:
        return pieces[0] if pieces else None
    return pieces[0].followed_by(*pieces[1:])


def delta_since(output: StageOutput, before: StageOutput | None) -> OutputDelta:
    """What a cumulative output adds to the last one; ``ValueError``: it begins otherwise."""
    last = before or StageOutput(output.request_id, output.stage, finished=False)
    text = None
    if output.text is not None:
        text = _rest("text", output.text, last.text or "")
    others = []
    for index, each in enumerate(output.completions[1:], 1):
        had = last.completions[index] if index < len(last.completions) else _NOTHING
        if each != had:
            others.append(
                CompletionDelta(
                    index,
                    _rest("text", each.text, had.text),
                    _rest("token_ids", each.token_ids, had.token_ids),
                    None if each.logprobs is None else each.logprobs[len(had.logprobs or ()) :],
                    each.finish_reason,
                )
            )
    return OutputDelta(
        output.request_id,
        output.finished,
        text,
        _rest("token_ids", output.token_ids, last.token_ids),
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


_NOTHING = Completion("", (), None)
_T = TypeVar("_T", str, tuple[int, ...])


def _rest(name: str, now: _T, before: _T) -> _T:
    if now[: len(before)] != before:
        raise ValueError(
            f"its {name} must begin with what its last output had, {before!r:.80}, got {now!r:.80}"
        )
    return now[len(before) :]
