"""Transcription and translation of speech to text, with segments over all windows."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Struct
from pydantic import BeforeValidator, Field, ValidationError, model_validator
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from engine import (
    AudioPrompt,
    AudioTask,
    ExplicitEncoderDecoderPrompt,
    SamplingParams,
    TokenLogprobs,
    TranscriptionOptions,
    TranscriptionWindow,
)
from engine.interface.placed_error import PlacedError
from engine.interface.settings import explain_validation_error
from engine.media.media_source import MediaSource
from omni.server.openai.answers import TokenCount, as_event, as_json
from omni.server.openai.chat_request import SampledRequest, merge_sampling
from omni.server.serving.api_error import ApiError
from omni.server.serving.client import Client
from omni.server.serving.pipeline_server import ServedPipeline
from omni.server.serving.request_body import Unsupported
from omni.server.serving.response_stream import DONE, PipelineResponse, ResponseStream
from stages import StageOutput

if TYPE_CHECKING:
    from omni.pipelines.pipeline import Pipeline

TIMESTAMP = re.compile(r"<\|\d+\.\d\d\|>")
"""Timestamps as written by tokenizers that support them."""

_TIMESTAMP_S = 0.02

_HEADING = re.compile(r"\A ?language [^<]{1,40}<asr_text>")
"""Language heading that an audio decoder writes before the words."""
_MAX_HEADING_CHARS = 64


class _WordReader:
    """Strips headings, timestamps and a leading space from generated text, piece by piece."""

    def __init__(self) -> None:
        self._held: str | None = ""  # possible beginning of a heading

    def read(self, text: str, *, is_last: bool = False) -> str:
        """Return the words of the next piece."""
        if self._held is not None:
            text = self._held + text
            begin = text.removeprefix(" ")[: len("language ")]
            may_follow = len(text) < _MAX_HEADING_CHARS and "language ".startswith(begin)
            if may_follow and not (is_last or _HEADING.match(text)):
                self._held = text
                return ""
            self._held, text = None, _HEADING.sub("", text.removeprefix(" "))
        return TIMESTAMP.sub("", text)


class TranscriptionSegment(Struct, kw_only=True):
    """The words between two times, in seconds of the recording.

    Attributes:
        seek: start of the window that contains them, in hundredths of a second.
        avg_logprob: average over the window's tokens.
        compression_ratio: ratio of the window's text by zlib; large for repetition loops.
        no_speech_prob: probability of no speech: the model's if a threshold requires it, else the
            voice detector's between these times.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float | None = None


def segments_of(
    token_ids: Sequence[int],
    windows: Sequence[TranscriptionWindow],
    duration_s: float | None,
    tokenizer: Any,
    logprobs: Sequence[TokenLogprobs] = (),
    temperature: float = 0.0,
) -> list[TranscriptionSegment]:
    """Split a transcription at its timestamps; text without an end timestamp ends with its window.

    Args:
        token_ids: concatenated tokens of all windows; so are ``logprobs``, if known.
        windows: start of each window; empty for a single window, decoded at ``temperature``.
        duration_s: duration of the recording; None if unknown.
    """
    parts = list(windows) or [TranscriptionWindow(0, 0.0, temperature)]
    found: list[TranscriptionSegment] = []
    ends = [*((each.first_token, each.begin_s) for each in parts[1:]), (len(token_ids), duration_s)]
    for window, (last, end) in zip(parts, ends, strict=True):
        first, begin = window.first_token, window.begin_s
        whole = tokenizer.decode(token_ids[first:last], skip_special_tokens=True).encode()
        likely = [each.logprob for each in logprobs[first:last]] or [0.0]
        for start, stop, ids in _split_at_times(token_ids[first:last], begin, end, tokenizer):
            text = str(tokenizer.decode(ids, skip_special_tokens=True))
            found.append(
                TranscriptionSegment(
                    id=len(found), seek=round(begin * 100), start=start, end=stop, text=text,
                    tokens=ids, avg_logprob=sum(likely) / len(likely),
                    compression_ratio=len(whole) / len(zlib.compress(whole)),
                    temperature=window.temperature, no_speech_prob=window.no_speech_prob,
                )
            )  # fmt: skip
    return found


def _split_at_times(
    token_ids: Sequence[int], begin: float, end: float | None, tokenizer: Any
) -> Iterator[tuple[float, float, list[int]]]:
    """Yield every run of word tokens, with its start and end times.

    All ids above ``<|notimestamps|>`` are timestamps. Many tokenizers have no text for them.
    """
    start = begin
    ids: list[int] = []
    first_time = tokenizer.get_added_vocab().get("<|notimestamps|>", sys.maxsize) + 1
    special = set(tokenizer.all_special_ids)
    for token_id in token_ids:
        if token_id < first_time:
            ids += [] if token_id in special else [token_id]
            continue
        now = round(begin + (token_id - first_time) * _TIMESTAMP_S, 2)
        if ids:
            yield start, now, ids
        start, ids = now, []
    if ids:
        yield start, max(start, end if end is not None else start), ids


_UNLIMITED_S = 1e6
"""Maximum duration of a recording that the model has already processed."""
_MAX_REPEATS = 8
"""Maximum repeats of the same words in a row, unless set by the stage; more are a loop."""
_MAX_FIELDS = 20
"""Maximum number of fields, and of files, in a form."""
# Of OpenAI's detector, accepted and ignored.
_DETECTOR_SETTINGS = {
    f"chunking_strategy[{name}]"
    for name in ("prefix_padding_ms", "silence_duration_ms", "threshold")
}

_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
"""Language token in prompts of speech models; their other special tokens are longer."""


def _strategy_type(value: Any) -> Any:
    return json.loads(value).get("type") if str(value).startswith("{") else value


class TranscriptionRequest(SampledRequest):
    """The fields of a form besides its file; without ``language`` the model detects it.

    ``vad`` skips audio without speech; OpenAI's name for that is ``chunking_strategy: auto``. The
    options of ``TranscriptionOptions`` have their own names; several temperatures may be given.
    """

    # A stream always ends with its usage.
    without_effect: ClassVar = frozenset(
        ("user", "request_id", "keywords", "languages", "hotwords", "stream_include_usage",
         "stream_continuous_usage_stats")
    )  # fmt: skip
    not_supported: ClassVar = {
        "to_language": Unsupported("translations are into English", ("en", "english")),
        "known_speaker_names": Unsupported("no model here tells speakers apart"),
        "include": Unsupported("segments of verbose_json have their avg_logprob"),
    }

    model: str
    language: str | None = Field(default=None, min_length=1)
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] = "json"
    timestamp_granularities: tuple[Literal["word", "segment"], ...] = ("segment",)
    temperature: tuple[float, ...] | None = None  # type: ignore[assignment]
    compression_ratio_threshold: float | None = None
    logprob_threshold: float | None = None
    no_speech_threshold: float | None = None
    condition_on_prev_tokens: bool | None = None
    prompt: str | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    vad: bool | None = None
    chunking_strategy: Annotated[
        Literal["auto", "server_vad"] | None, BeforeValidator(_strategy_type)
    ] = None

    @model_validator(mode="after")
    def _check_format(self) -> TranscriptionRequest:
        if self.stream and self.response_format not in ("json", "text"):
            raise PlacedError(
                ("stream",), f"goes with json and text, not with {self.response_format}"
            )
        if self.wants_words and self.response_format != "verbose_json":
            raise PlacedError(
                ("timestamp_granularities",),
                f"word goes with verbose_json, not with {self.response_format}",
            )
        return self

    @property
    def wants_words(self) -> bool:
        """True if the model must return timestamps of words."""
        return "word" in self.timestamp_granularities

    @property
    def options(self) -> TranscriptionOptions | None:
        """Options for the model; with a temperature of 0 the stage chooses further ones."""
        names = {each.name for each in fields(TranscriptionOptions)}
        given: dict[str, Any] = self.model_dump(include=names)
        given["prompt"] = self.prompt or None  # clients send an empty one for none
        given["temperature"] = None if self.temperature == (0.0,) else self.temperature
        options = TranscriptionOptions(**given, return_token_timestamps=self.wants_words or None)
        return options if options.given else None

    @property
    def wants_segments(self) -> bool:
        """True if the model must return timestamps of segments."""
        return self.response_format not in ("json", "text")


def _subtitles(segments: Sequence[TranscriptionSegment], *, as_vtt: bool) -> str:
    point = "." if as_vtt else ","
    cues = ["WEBVTT"] if as_vtt else []
    for number, segment in enumerate(segments, 1):
        times = f"{_format_time(segment.start, point)} --> {_format_time(segment.end, point)}"
        # Escape cue syntax: an arrow starts a cue, and an empty line ends one.
        text = " ".join(segment.text.split()).replace("-->", "->")
        cues.append("\n".join([*([] if as_vtt else [str(number)]), times, text]))
    return "\n\n".join(cues) + "\n"


def _format_time(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    whole, milliseconds = divmod(milliseconds, 1000)
    return f"{hours:02}:{minutes:02}:{whole:02}{point}{milliseconds:03}"


async def read_transcription(request: Request) -> tuple[TranscriptionRequest, bytes]:
    """Parse a form and its file."""
    # Accepts more than one file, so that the error can name the problem.
    async with request.form(max_files=_MAX_FIELDS, max_fields=_MAX_FIELDS) as form:
        given: dict[str, Any] = {}
        for key in form:
            name = key.removesuffix("[]").replace("chunking_strategy[type]", "chunking_strategy")
            if name not in _DETECTOR_SETTINGS:
                given[name] = _value_of(key, form.getlist(key))
        file = given.pop("file", None)
        if not isinstance(file, UploadFile):
            raise ApiError.bad_field("file", "missing; it must be given as a file")
        content = await file.read()
    if not content:
        raise ApiError.bad_field("file", "it is empty")
    try:
        return TranscriptionRequest.model_validate(given), content
    except ValidationError as error:
        lines = explain_validation_error(error, TranscriptionRequest, given).split("\n")
        raise ApiError.bad_request("; ".join(lines), param=lines[0].partition(":")[0]) from None


_LISTS = ("temperature", "timestamp_granularities")
_SAMPLING_FIELDS = TranscriptionRequest.model_fields.keys() & SamplingParams.model_fields.keys() - {
    "temperature"
}


def _value_of(key: str, values: Sequence[Any]) -> Any:
    """Return the single value of a field, or the values of a list."""
    if key.endswith("[]"):
        return list(values)
    if len(values) > 1:
        message = f"{key:.80}: given {len(values)} times; give it once"
        raise ApiError.bad_request(message, param=key)
    return [values[0]] if key in _LISTS and values[0] else values[0]


class Transcription(PipelineResponse):
    """The response to a request for a transcription or a translation into English."""

    prompt_param = "file"

    def __init__(
        self, request: Request, body: TranscriptionRequest, audio: bytes, task: AudioTask
    ) -> None:
        super().__init__(request, body.model, is_streamed=body.stream)
        self._body = body
        self._task = task
        self._audio = audio
        self._stage = _transcribing_stage(self.stages)
        self._tokenizer: Any = self.pipeline.tokenizers[self._stage]
        if self._tokenizer is None:
            raise ApiError.bad_request("this model has no tokenizer", param="model")
        own = self.stages.stages[self._stage].sampling
        sampling: dict[str, Any] = body.model_dump(include=_SAMPLING_FIELDS, exclude_none=True)
        if own is not None and own.max_repeats is None:
            sampling.setdefault("max_repeats", _MAX_REPEATS)
        if body.temperature is not None:
            sampling["temperature"] = body.temperature[0]
        if body.max_completion_tokens is not None:
            sampling["max_tokens"] = body.max_completion_tokens
        if body.response_format == "verbose_json":
            sampling["logprobs"] = 0
        prompt = AudioPrompt(
            audio,
            language=body.language,
            # Checkpoints with a single task accept none.
            task=None if task == "transcribe" and body.language is None else task,
            timestamps=True if body.wants_segments else None,
            vad=True if body.chunking_strategy is not None else body.vad,
            transcription=body.options,
        )
        names = {"max_tokens": "max_completion_tokens"}
        merged = merge_sampling(self.stages, self._stage, sampling, body.stages, names)
        self._request = self.client.request(
            ExplicitEncoderDecoderPrompt(prompt), merged, **body.scheduling
        )

    async def whole(self) -> Response:
        """Return the text, without waiting for later stages."""
        async with self.stream([self._request], [self._stage]) as stream:
            (last,) = await stream.last_outputs()
        output = last[self._stage]
        text = _WordReader().read(output.text or "", is_last=True)
        if self._body.response_format == "text":
            return Response(text + "\n", media_type="text/plain; charset=utf-8")
        source = MediaSource(self._audio, "sound", len(self._audio))
        # Imported lazily: audio libraries would delay the server's start.
        from engine.media.sound_file import stated_duration

        duration = await asyncio.to_thread(stated_duration, source)
        answer: dict[str, Any] = {"text": text}
        if duration is not None:
            answer["usage"] = {"type": "duration", "seconds": duration}
        if self._body.wants_segments:
            answer |= await self._verbose(output, source, duration)
        if self._body.response_format in ("srt", "vtt"):
            subtitles = _subtitles(answer["segments"], as_vtt=self._body.response_format == "vtt")
            return Response(subtitles, media_type="text/plain; charset=utf-8")
        return Response(as_json(answer), media_type="application/json")

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the text as events, as it is generated."""
        text, reader, count = "", _WordReader(), TokenCount()
        async with self.stream([self._request], [self._stage]) as stream:
            async for update in stream.updates():
                delta = update.of(self._stage)
                if delta is not None:
                    count.add(delta)
                said = (delta.text or "") if delta is not None else ""
                text += (words := reader.read(said, is_last=update.is_last))
                if words:
                    yield as_event({"type": "transcript.text.delta", "delta": words})
        usage = {
            "type": "tokens",
            "input_tokens": count.prompt,
            "output_tokens": sum(count.written.values()),
            "total_tokens": count.prompt + sum(count.written.values()),
        }
        yield as_event({"type": "transcript.text.done", "text": text, "usage": usage}) + DONE

    async def _verbose(
        self, output: StageOutput, source: MediaSource, duration: float | None
    ) -> dict[str, Any]:
        language = self._body.language or self._detected_language(output)
        found = output.token_ids, output.windows, duration, self._tokenizer
        first = (self._body.temperature or (0.0,))[0]
        segments = segments_of(*found, output.logprobs or (), first)
        if self._body.response_format == "verbose_json":
            await asyncio.to_thread(_set_no_speech_probs, source, segments)
        answer: dict[str, Any] = {} if language is None else {"language": language}
        answer |= {"task": self._task, "duration": duration}
        if "segment" in self._body.timestamp_granularities:
            answer["segments"] = segments
        if self._body.wants_words:
            words = [each for window in output.windows for each in window.words]
            answer["words"] = [each._replace(word=each.word.strip())._asdict() for each in words]
        return answer

    def _detected_language(self, output: StageOutput) -> str | None:
        """Return the language detected by the model; None for single-language models."""
        pieces = self._tokenizer.convert_ids_to_tokens(list(output.prompt_token_ids))
        found = (_LANGUAGE.fullmatch(piece or "") for piece in pieces)
        return next((match[1] for match in found if match is not None), None)


def _set_no_speech_probs(source: MediaSource, segments: Sequence[TranscriptionSegment]) -> None:
    """Set the missing no-speech probabilities of segments by the voice detector."""
    from engine.media.sound_file import LongestSound, read_sound
    from engine.media.voice_detector import DETECTOR_RATE, WINDOW, VoiceDetector

    samples, _ = read_sound(source, longest=LongestSound(_UNLIMITED_S), rate=DETECTOR_RATE)
    speech = [*VoiceDetector().feed(samples), 0.0]
    for segment in segments:
        if segment.no_speech_prob is not None:
            continue
        begin, end = (int(at * DETECTOR_RATE / WINDOW) for at in (segment.start, segment.end))
        segment.no_speech_prob = 1.0 - max(speech[begin : max(begin, end) + 1], default=0.0)


async def words_of(
    pipeline: ServedPipeline, client: Client, prompt: AudioPrompt, number: int
) -> AsyncIterator[str]:
    """Yield the words of audio as they are generated; ``number`` numbers the client's requests."""
    stage = _transcribing_stage(pipeline.omni.pipeline)
    spoken = ExplicitEncoderDecoderPrompt(prompt)
    fields = {"max_repeats": _MAX_REPEATS}
    sampling = merge_sampling(pipeline.omni.pipeline, stage, fields, {}, {})
    request, reader = client.request(spoken, sampling, index=number), _WordReader()
    async with ResponseStream(pipeline, client, [request], "audio", [stage]) as stream:
        async for update in stream.updates():
            delta = update.of(stage)
            said = (delta.text or "") if delta is not None else ""
            if words := reader.read(said, is_last=update.is_last):
                yield words


def _transcribing_stage(pipeline: Pipeline) -> str:
    """Return the first stage that reads the user's prompt and outputs text to the user."""
    for name, stage in pipeline.stages.items():
        if stage.inputs is None and "text" in stage.final_output:
            return name
    reason = "none of this model's stages reads the prompt and gives text"
    raise ApiError.bad_request(reason, param="model")
