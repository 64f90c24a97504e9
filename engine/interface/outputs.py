"""Outputs, deltas, metrics and statistics of engines."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from engine.interface.hints import Tensor, Tensors

if TYPE_CHECKING:
    from prefix_cache import KVCacheStats, OffloadStats

ROW_KEYS = "row_keys"
"""An output of any model: keys by which the next stage's cache may identify its rows without
reading them. Computed only if requested by name."""

_PCM_MAX = 2**15 - 1
"""Maximum of a 16-bit sample."""

_SUBTYPES = {"wav": "PCM_16", "flac": "PCM_16", "ogg": "VORBIS", "mp3": "MPEG_LAYER_III"}


@dataclass(frozen=True, slots=True, eq=False)
class Waveform:
    """Mono samples.

    Attributes:
        samples: ``(num_samples,)`` float32 on the CPU, in -1 to 1.
        sampling_rate: samples per second.
    """

    samples: Tensor
    sampling_rate: int

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return self.samples.shape[0] / self.sampling_rate

    def save(self, path: str | Path, format: str | None = None) -> None:
        """Write a file: WAV of 16 bits, rounded; or FLAC, OGG or MP3.

        Samples beyond -1 to 1 are clipped, not wrapped.

        Args:
            path: path of the file; an existing file is replaced.
            format: ``wav``, ``flac``, ``ogg`` or ``mp3``; None uses the path's suffix.

        Raises:
            ValueError: another format, or the samples are not ``(num_samples,)`` finite floating
                point numbers. Nothing is written then.
            OSError: the file cannot be written.
        """
        kind = (Path(path).suffix[1:] if format is None else format).lower()
        if kind not in _SUBTYPES:
            raise ValueError(
                f"a waveform is written as {', '.join(_SUBTYPES)}, got {kind!r}; give the path one "
                "of these endings"
            )
        Path(path).write_bytes(self.encoded(kind))

    def encoded(self, format: str) -> bytes:
        """Return the content of the file that :meth:`save` writes.

        Args:
            format: as in :meth:`save`, or ``pcm16`` for the bare samples, little-endian.

        Raises:
            ValueError: as in :meth:`save`.
        """
        # Imported late: prompts and settings do not need them.
        import numpy
        import torch

        samples = self.samples
        if samples.dtype is torch.bfloat16:  # which numpy lacks
            samples = samples.float()
        # In numpy: for a server's short pieces torch takes three times as long, and yields to other
        # threads at every operation, which may keep all of the server's clients waiting.
        values = samples.numpy(force=True)
        if values.ndim != 1 or values.dtype.kind != "f" or not numpy.isfinite(values).all():
            raise ValueError(
                "a waveform must be (num_samples,) finite floating point numbers, "
                f"got {tuple(samples.shape)} {self.samples.dtype}"
            )
        scaled = values.clip(-1.0, 1.0).astype(numpy.float32, copy=False) * numpy.float32(_PCM_MAX)
        rounded = numpy.rint(scaled, out=scaled).astype(numpy.int16)
        if format == "pcm16":
            return bytes(rounded.astype("<i2", copy=False).tobytes())
        import soundfile

        content = BytesIO()
        try:
            soundfile.write(
                content, rounded, self.sampling_rate, _SUBTYPES[format], format=format.upper()
            )
        except soundfile.LibsndfileError as error:
            raise ValueError(
                f"{self.sampling_rate} samples per second cannot be written as {format}: {error}"
            ) from error
        return content.getvalue()

    def followed_by(self, *others: Waveform) -> Waveform:
        """Concatenate waveforms.

        Raises:
            ValueError: their sampling rates differ.
        """
        import torch  # imported late: prompts and settings do not need it

        for other in others:
            if other.sampling_rate != self.sampling_rate:
                raise ValueError(
                    f"sound of {self.sampling_rate} samples per second cannot be followed by sound "
                    f"of {other.sampling_rate}"
                )
        samples = torch.cat([self.samples, *(other.samples for other in others)])
        return Waveform(samples, self.sampling_rate)


class FinishReason(StrEnum):
    """The reason why a request ended: a stop token or string, its length, the user, or an error."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one generated position, from the raw distribution, likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request, in seconds; None for a time not reached yet.

    Attributes:
        queue_s: from arrival to the first step that ran it.
        first_token_s: from arrival to the first generated token.
        total_s: from arrival to the end.
        prefix_miss: keyword for why no more of its prompt was a prefix cache hit; see
            :data:`prefix_cache.PrefixMiss`. None if all that can be hit was, or without a cache.
    """

    queue_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None
    num_preemptions: int = 0
    prefix_miss: str | None = None


class TimedWord(NamedTuple):
    """A word with its time in the recording, in seconds."""

    word: str
    start: float
    end: float


class TranscriptionWindow(NamedTuple):
    """One window of a recording that has several, or for which more than text was requested.

    Attributes:
        first_token: index of its first token among all generated ones.
        begin_s: its start in the recording, in seconds; timestamps count from there.
        temperature: temperature at which its text was sampled.
        no_speech_prob: the model's probability that it has no speech; None without a threshold
            that needs it.
        token_timestamps: end of each token, in seconds of the recording; empty if not requested.
        words: the words that the tokens form; empty if not requested.
    """

    first_token: int
    begin_s: float
    temperature: float = 0.0
    no_speech_prob: float | None = None
    token_timestamps: tuple[float, ...] = ()
    words: tuple[TimedWord, ...] = ()


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """The changes of one completion of several.

    Attributes:
        index: index among the ``n`` completions, from 1: the delta itself has the first one's.
        logprobs: one entry per new token; None if not requested.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """The changes of one request, emitted by engines and stages.

    Text is final: never half a character, never part of a stop string, never taken back. The sum of
    all deltas is the output.

    Attributes:
        text: new text; None from a model without text.
        logprobs: one entry per new token; None if not requested.
        finish_reason: set once the first completion has ended.
        num_completions: number of completions; 0 from a model that generates no tokens.
        others: changes of the completions after the first.
        whole_audio: the whole sound, when finished, if it is not the sum of its pieces.
        num_cached_tokens: input tokens whose computation the cache saved.
        prompt_token_ids: ids of the input, when finished.
        encoder_prompt_token_ids: input ids of an encoder-decoder's encoder, in the first delta.
        tensors: rows of all tokens, when finished.
        windows: all windows that have ended so far, whenever another one ends.
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
    windows: tuple[TranscriptionWindow, ...] = ()
    metrics: RequestMetrics | None = None

    @property
    def failure(self) -> str | None:
        """The reason why the request failed; None while it runs and after success."""
        return failure_of(self.finished, self.error, self.finish_reason)


def failure_of(finished: bool, error: str | None, reason: FinishReason | None) -> str | None:
    """Return why a request failed; None while it runs and after success."""
    if finished and error is None and reason in (FinishReason.ERROR, FinishReason.ABORT):
        return f"it ended the request early ({reason})"
    return error if finished else None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """The current state of one completion of a prompt.

    Attributes:
        index: index among the ``n`` completions.
        text: all text so far; never half a character, never part of a stop string.
        delta: growth of ``text`` since the previous output.
        token_ids: all generated ids so far, including a stop token.
        logprobs: one entry per generated token; None if not requested.
        finish_reason: None while it runs.
        tensors: ``name -> (rows, ...)`` on the CPU: one row for every token whose forward pass
            has run (the prompt and all generated tokens but the last); values drawn with a token
            also have a row for a last token that reached a limit. Only when finished.
        windows: finished windows of a recording; empty if the text is of a single window.
    """

    index: int
    text: str
    delta: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    tensors: Tensors = field(default_factory=dict)
    windows: tuple[TranscriptionWindow, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The state of one request after a step that changed it.

    Attributes:
        outputs: one entry per completion (``SamplingParams.n``), in order of their index.
        finished: True if every completion has ended; no output follows then.
        num_prompt_tokens: tokens (or embedding rows) of the prompt.
        num_cached_tokens: prompt tokens whose computation the prefix cache saved.
        error: error message of a request that failed alone, with ``FinishReason.ERROR``.
        prompt_token_ids: ids of the whole (decoder) prompt; empty for embeddings.
        encoder_prompt_token_ids: input ids of an encoder-decoder's encoder, for text.
        encoder_prompt: the text of these ids, if given as text.
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
    """The result of one input of an encoder engine, never partial.

    Attributes:
        finished: always True; the field lets callers treat all engines alike.
        tensors: on the CPU; ``hidden_states`` is ``(num_prompt_tokens, D)``, ``pooled`` ``(D,)``.
            Empty if the request failed.
        num_prompt_tokens: tokens (or embedding rows) of the input.
        num_cached_tokens: all of them if the input was cached, else 0.
        prompt_token_ids: the input's ids; empty for embeddings.
        metrics: times, without a first token.
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
        """Return the only delta of the input."""
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
    """The sound of an utterance, partial or finished.

    Attributes:
        delta: sound since the previous output; None for a failed request.
        waveform: the whole sound, when finished; None before and for a failed request.
        is_cut_off: True if its last codes reported that a length limit cut them off.
        metrics: times, without a first token.
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
        """Return it as a delta, with the whole sound only if that is empty."""
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


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of one engine's counters, which start at 0 when it is built.

    Attributes:
        num_steps: steps run, except those without work, as every request is paused or waits for
            input: the runtime detects progress by it.
        busy_s: seconds spent in steps.
        prompt_tokens: tokens of all inputs that started to run.
        cached_tokens: tokens of these that the cache saved.
        encoder_runs: encoded inputs: each image, sound or video of a tower; each whole encoder
            prompt of an encoder-decoder's encoder. An encoder engine, which runs no decoder,
            counts none.
        encoder_hits: needed inputs of this kind whose rows were cached. Inputs within a cached
            prefix are not needed, and count for neither.
        num_preemptions: number of preempted requests.
        num_restarts: rebuilds of a stage's engine and restarts of its worker; 0 for an engine by
            itself.
        num_transfers: outputs and chunks of other stages that were passed to a stage.
        num_running: requests in steps at the time of the snapshot.
        num_waiting: requests waiting for a step then, including preempted and idle ones.
        kv: the pool at the time of the snapshot, including rows of encoders and towers; None for
            an engine without blocks.
        offload: contents and hits of the tiers below the pool; None without any.
    """

    num_steps: int = 0
    busy_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    encoder_runs: int = 0
    encoder_hits: int = 0
    num_preemptions: int = 0
    num_restarts: int = 0
    num_transfers: int = 0
    transferred_bytes: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv: KVCacheStats | None = None
    offload: OffloadStats | None = None

    def plus(self, **counts: float) -> EngineStats:
        """Return the counters with these counts added, by name."""
        return replace(self, **{name: getattr(self, name) + n for name, n in counts.items()})

    def since(self, earlier: EngineStats) -> EngineStats:
        """Return the increase since an earlier snapshot; momentary values are kept."""
        return self.plus(**{name: -getattr(earlier, name) for name in _COUNTERS})

    def following(self, earlier: EngineStats) -> EngineStats:
        """Add an earlier snapshot's counters, as of one engine; momentary values are kept."""
        return self.plus(**{name: getattr(earlier, name) for name in _COUNTERS})

    def beside(self, other: EngineStats) -> EngineStats:
        """Add the counters of two engines that run the same model concurrently."""
        sums = {name: getattr(other, name) for name in (*_COUNTERS, *_COUNT_GAUGES)}
        return replace(
            self.plus(**sums),
            kv=_beside(self.kv, other.kv),
            offload=_beside(self.offload, other.offload),
        )


_COUNT_GAUGES = ("num_running", "num_waiting")
_GAUGES = (*_COUNT_GAUGES, "kv", "offload")
_COUNTERS = tuple(each.name for each in fields(EngineStats) if each.name not in _GAUGES)

_PoolT = TypeVar("_PoolT", "KVCacheStats", "OffloadStats")


def _beside(one: _PoolT | None, other: _PoolT | None) -> _PoolT | None:
    if one is None or other is None:
        return one or other
    return one.beside(other)
