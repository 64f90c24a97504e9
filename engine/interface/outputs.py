"""What an engine hands back."""

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
"""An output of any model: what the cache of the next stage may know its rows by, without reading
them. Made only where it is asked for by name."""

_LOUDEST = 2**15 - 1
"""Of samples of 16 bits."""

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

        What is beyond -1 to 1 is clipped, not wrapped.

        Args:
            path: of the file; one that exists is replaced.
            format: ``wav``, ``flac``, ``ogg`` or ``mp3``; None takes the path's ending.

        Raises:
            ValueError: the format is another, or the samples are not ``(num_samples,)`` finite
                floating point numbers. Nothing is written then.
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
        """What :meth:`save` would write into a file.

        Args:
            format: as there, or ``pcm16`` for the samples alone, little-endian.

        Raises:
            ValueError: as there.
        """
        # Not when prompts and settings are named.
        import numpy
        import torch

        samples = self.samples
        if samples.dtype is torch.bfloat16:  # which numpy does not have
            samples = samples.float()
        # By numpy: a server writes sound in pieces, for which torch takes three times as long, and
        # lets another thread in at every step, which may keep all of the server's clients waiting.
        values = samples.numpy(force=True)
        if values.ndim != 1 or values.dtype.kind != "f" or not numpy.isfinite(values).all():
            raise ValueError(
                "a waveform must be (num_samples,) finite floating point numbers, "
                f"got {tuple(samples.shape)} {self.samples.dtype}"
            )
        scaled = values.clip(-1.0, 1.0).astype(numpy.float32, copy=False) * numpy.float32(_LOUDEST)
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
        """Play one after the other.

        Raises:
            ValueError: their sampling rates differ.
        """
        import torch  # not when prompts and settings are named

        for other in others:
            if other.sampling_rate != self.sampling_rate:
                raise ValueError(
                    f"sound of {self.sampling_rate} samples per second cannot be followed by sound "
                    f"of {other.sampling_rate}"
                )
        samples = torch.cat([self.samples, *(other.samples for other in others)])
        return Waveform(samples, self.sampling_rate)


class FinishReason(StrEnum):
    """Why a request ended: a stop token or string, its length, the user, or a failure."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one generated position, of the raw distribution, likeliest first."""

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
        prefix_miss: in a word, why no more of its prompt was hit in the prefix cache; see
            :data:`prefix_cache.PrefixMiss`. None if all that can be hit was, or nothing is cached.
    """

    queue_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None
    num_preemptions: int = 0
    prefix_miss: str | None = None


class TimedWord(NamedTuple):
    """A word, and when it is spoken, in seconds of the recording."""

    word: str
    start: float
    end: float


class TranscriptionWindow(NamedTuple):
    """One window of a recording that took several, or that was asked for more than its text.

    Attributes:
        first_token: place of its first token among all that were generated.
        begin_s: its place in the recording, in seconds; timestamps count from there.
        temperature: at which its text was written.
        no_speech_prob: how likely the model took it to be without speech; None where no threshold
            asks for it.
        token_timestamps: for each token when it ends, in seconds of the recording, and the words
            that they make up; none where not asked for.
    """

    first_token: int
    begin_s: float
    temperature: float = 0.0
    no_speech_prob: float | None = None
    token_timestamps: tuple[float, ...] = ()
    words: tuple[TimedWord, ...] = ()


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """What is new of one completion of several.

    Attributes:
        index: which of the ``n`` completions, from 1: the first one's are in the delta itself.
        logprobs: one entry per new token; None when not asked for.
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
        text: new text; None from what makes none.
        logprobs: one entry per new token; None when not asked for.
        finish_reason: if the first completion has ended.
        num_completions: how many there are; 0 from what does not generate tokens.
        others: what is new of the completions after the first.
        whole_audio: all sound, when finished, where it is not the sum of its pieces.
        num_cached_tokens: tokens of the input that the cache saved computing.
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
    windows: tuple[TranscriptionWindow, ...] = ()
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
            has run (the prompt and all generated tokens but the last); what is drawn with a token
            has one also for a last token that reached a limit. Only when finished.
        windows: of a recording, those that have ended; none of a text that is one window's alone.
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
    """The state of one request after a step that moved it.

    Attributes:
        outputs: one entry per completion (``SamplingParams.n``), in order of their index.
        finished: whether every completion has ended; nothing follows after that.
        num_prompt_tokens: tokens (or embedding rows) of the prompt.
        num_cached_tokens: prompt tokens whose computation the prefix cache saved.
        error: the message of a request that failed alone, with ``FinishReason.ERROR``.
        prompt_token_ids: the prompt's ids (the whole decoder prompt's); empty for embeddings.
        encoder_prompt_token_ids: what an encoder-decoder's encoder read, if it was text.
        encoder_prompt: the text that they came from, if it was text.
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
        finished: always True; the field lets callers treat all engines alike.
        tensors: on the CPU; ``hidden_states`` is ``(num_prompt_tokens, D)``, ``pooled`` ``(D,)``.
            Empty when the request failed.
        num_prompt_tokens: tokens (or embedding rows) of the input.
        num_cached_tokens: all of them when the cache had the input, else 0.
        prompt_token_ids: the input's ids; empty for embeddings.
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
        delta: what was made since the output before; None for a request that failed.
        waveform: all of it, when finished; None before and for a request that failed.
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


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A reading of one engine's counters, which begin at 0 when it is built.

    Attributes:
        num_steps: steps run. One that found nothing to do, since every request is paused or
            waits for input, is not counted: the runtime sees by it whether anything moves.
        busy_s: seconds spent in steps.
        prompt_tokens: tokens of all inputs that began to run.
        cached_tokens: of these, tokens that the cache saved.
        encoder_runs: inputs that were encoded: by a tower, an image, sound or video each; by an
            encoder-decoder's encoder, a whole encoder prompt each. An encoder engine, which runs
            no decoder, counts none.
        encoder_hits: such inputs that were needed and whose rows were there. What a prefix of
            cached tokens shows is not needed, and counts for neither.
        num_preemptions: how often a request had to give its blocks back.
        num_restarts: how often a stage's engine was rebuilt, or its worker started again; an
            engine by itself has none.
        num_transfers: outputs and chunks of other stages that were handed to a stage.
        num_running: requests in steps at the time of the reading.
        num_waiting: requests that wait for a step then, preempted and resting ones included.
        kv: the pool at the time of the reading, what encoders and towers made included; None for an
            engine without blocks.
        offload: what the tiers below the pool hold and have given; None without any.
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
        """The counters after some more work, given by their names."""
        return replace(self, **{name: getattr(self, name) + n for name, n in counts.items()})

    def since(self, earlier: EngineStats) -> EngineStats:
        """What was added since an earlier reading; what is of its time stays as read."""
        return self.plus(**{name: -getattr(earlier, name) for name in _COUNTERS})

    def following(self, earlier: EngineStats) -> EngineStats:
        """Add both, as if one engine had gone on; what is of its time is as read here."""
        return self.plus(**{name: getattr(earlier, name) for name in _COUNTERS})

    def beside(self, other: EngineStats) -> EngineStats:
        """Add both, of engines that run the same model beside each other."""
        sums = {name: getattr(other, name) for name in (*_COUNTERS, *_COUNTS_OF_NOW)}
        return replace(
            self.plus(**sums),
            kv=_beside(self.kv, other.kv),
            offload=_beside(self.offload, other.offload),
        )


_COUNTS_OF_NOW = ("num_running", "num_waiting")
_OF_NOW = (*_COUNTS_OF_NOW, "kv", "offload")
_COUNTERS = tuple(each.name for each in fields(EngineStats) if each.name not in _OF_NOW)

_PoolT = TypeVar("_PoolT", "KVCacheStats", "OffloadStats")


def _beside(one: _PoolT | None, other: _PoolT | None) -> _PoolT | None:
    if one is None or other is None:
        return one or other
    return one.beside(other)
