"""Speech synthesis: audio for a text, encoded piece by piece in the formats of OpenAI's API."""

from __future__ import annotations

import asyncio
import io
import math
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from starlette.requests import Request

from engine import ChatPrompt, Prompt, Waveform
from omni.pipelines.voices import speak_like
from omni.server.openai.answers import TokenCount, as_event, usage_of
from omni.server.openai.chat_request import StageFields, Voice, merge_sampling
from omni.server.serving.api_error import ApiError
from omni.server.serving.request_body import Unsupported, fetch_file
from omni.server.serving.response_stream import EVENTS, PipelineResponse

if TYPE_CHECKING:
    from av import AudioFrame
    from av.filter import Graph

    from engine.media.sound_file import Resampler
    from omni.pipelines.pipeline import Pipeline

AudioFileFormat = Literal["wav", "mp3", "flac", "opus", "aac", "pcm"]

_PCM_RATE = 24_000
"""Sampling rate that clients assume for ``pcm``, which has no header to state it."""

_MAX_SAMPLE = np.float32(2**15 - 1)

AUDIO_FILES: dict[AudioFileFormat, tuple[str, str, str, dict[str, str]]] = {
    "pcm": ("audio/pcm", "s16le", "pcm_s16le", {}),
    "wav": ("audio/wav", "wav", "pcm_s16le", {"fflags": "+bitexact"}),
    # Frames only: headers state the length, which is not known yet.
    "mp3": ("audio/mpeg", "mp3", "libmp3lame", {"write_xing": "0", "id3v2_version": "0"}),
    "opus": ("audio/ogg", "ogg", "libopus", {"page_duration": "100000"}),  # µs; default: 1 s
    "aac": ("audio/aac", "adts", "aac", {}),
    "flac": ("audio/flac", "flac", "flac", {}),
}
"""By format: the media type, and FFmpeg's container, codec and options."""


class SpokenPieces:
    """Converts the audio of one answer to 16-bit samples, piece by piece, independent of the cuts.

    ``rate`` is the sampling rate, by default the pipeline's. ``speed``, from 0.25 to 4, changes the
    tempo of the speech but not its pitch.
    """

    def __init__(self, rate: int | None = None, speed: float = 1.0) -> None:
        self.rate = rate
        self._speed = speed
        self._tempo: Graph | None = None
        self._resampler: Resampler | None = None

    def feed(self, sound: Waveform) -> bytes:
        """Convert the next piece of audio; speed and rate conversion may delay the output."""
        samples, made = sound.encoded("pcm16"), sound.sampling_rate
        self.rate = self.rate or made
        if self._speed != 1.0 and samples:
            if self._tempo is None:
                self._tempo = _tempo_graph(made, self._speed)
            samples = self._change_tempo(_frame(samples, made))
        if self.rate != made and self._resampler is None:
            # Imported lazily: audio libraries would delay the server's start.
            from engine.media.sound_file import Resampler

            self._resampler = Resampler(made, self.rate)
        return self._resample(samples)

    def flush(self) -> bytes:
        """Flush the output after the last piece."""
        return self._resample(b"" if self._tempo is None else self._change_tempo(None), last=True)

    def _change_tempo(self, frame: AudioFrame | None) -> bytes:
        import av

        assert self._tempo is not None
        self._tempo.push(frame)
        parts = []
        while True:
            try:
                parts.append(self._tempo.pull().to_ndarray().tobytes())
            except (av.BlockingIOError, av.EOFError):
                return b"".join(parts)

    def _resample(self, samples: bytes, *, last: bool = False) -> bytes:
        if self._resampler is None:
            return samples
        given = np.frombuffer(samples, "<i2").astype(np.float32) / _MAX_SAMPLE
        made = self._resampler.resampled(given, last=last).clip(-1, 1) * _MAX_SAMPLE
        return bytes(np.rint(made).astype("<i2").tobytes())


def _tempo_graph(rate: int, speed: float) -> Graph:
    """Create a graph of FFmpeg's ``atempo`` filters."""
    import av.filter

    graph = av.filter.Graph()
    # A factor of at most 2 each: beyond that the filter skips samples, or rejects the value.
    num_steps = math.ceil(abs(math.log2(speed)))
    steps = [graph.add("atempo", f"{speed ** (1 / num_steps)}") for _ in range(num_steps)]
    source = graph.add_abuffer(sample_rate=rate, format="s16", layout="mono")
    graph.link_nodes(source, *steps, graph.add("abuffersink")).configure()
    return graph


def _frame(samples: bytes, rate: int) -> AudioFrame:
    import av

    frame = av.AudioFrame.from_ndarray(np.frombuffer(samples, "<i2")[None], "s16", "mono")
    frame.sample_rate = rate
    return frame


class SpokenFile:
    """Encodes the audio of one answer as a file that is playable while it is written.

    It has the audio's own sampling rate, or the next one that the format supports. Only FLAC is
    returned in one piece, since its header states the length.
    """

    def __init__(self, form: AudioFileFormat, speed: float = 1.0) -> None:
        self._form = form
        self._pieces = SpokenPieces(_PCM_RATE if form == "pcm" else None, speed)
        self._out, self._num_taken = io.BytesIO(), 0
        self._container: Any = None
        self._stream: Any = None

    @property
    def has_begun(self) -> bool:
        """True once any audio was added."""
        return self._container is not None

    def feed(self, sound: Waveform) -> bytes:
        """Encode the next piece of audio, and return the new bytes of the file, if any."""
        samples = self._pieces.feed(sound)
        if self._container is None:
            self._open(self._pieces.rate or sound.sampling_rate)
        self._encode(samples)
        return b"" if self._form == "flac" else self._new_bytes()

    def flush(self) -> bytes:
        """Close the file, and return its remaining bytes."""
        self._encode(self._pieces.flush())
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._new_bytes()

    def _open(self, rate: int) -> None:
        import av

        _, container, codec, options = AUDIO_FILES[self._form]
        rates = av.codec.Codec(codec, "w").audio_rates or [rate]
        at_rate = min((each for each in rates if each >= rate), default=max(rates))
        self._container = av.open(self._out, "w", format=container, options=options)
        self._stream = self._container.add_stream(codec, rate=at_rate, layout="mono")

    def _encode(self, samples: bytes) -> None:
        if samples:
            assert self._pieces.rate is not None
            self._container.mux(self._stream.encode(_frame(samples, self._pieces.rate)))

    def _new_bytes(self) -> bytes:
        new = bytes(self._out.getbuffer()[self._num_taken :])
        self._num_taken += len(new)
        return new


def speaking_stage(pipeline: Pipeline, param: str) -> str:
    """Return the last stage that outputs audio to the user."""
    speaking = [name for name, stage in pipeline.stages.items() if "audio" in stage.final_output]
    if not speaking:
        raise ApiError.bad_field(param, "this model does not speak")
    return speaking[-1]


def check_voice(pipeline: Pipeline, voice: str | None, param: str) -> None:
    """Check that the pipeline has a voice, before anything runs."""
    try:
        pipeline.voices.find(voice)
    except ValueError as error:
        raise ApiError.bad_field(param, str(error)) from error


class SpeechRequest(StageFields):
    """A request for speech.

    Without a ``voice``, the pipeline chooses one, or clones that of ``ref_audio``, a data URL or
    HTTP(S) URL; ``ref_text`` is its transcript, for models that need it. ``pcm`` is 16-bit
    little-endian samples at 24,000 Hz.
    """

    not_supported: ClassVar = {
        "language": Unsupported("the text decides"),
        "task_type": Unsupported("use voice, instructions or ref_audio"),
    }

    model: str
    input: str = Field(min_length=1)
    voice: Voice | None = None
    response_format: AudioFileFormat = "mp3"
    instructions: str | None = None
    ref_audio: str | None = None
    ref_text: str | None = None
    speed: float = Field(default=1.0, ge=0.25, le=4.0)
    stream_format: Literal["audio", "sse"] = "audio"


class Speech(PipelineResponse):
    """The response to a request for speech: a file streamed as it is generated, raw or in events.

    The pipeline runs as in a chat: it depends on the model whether it reads the input aloud or
    replies to it.
    """

    prompt_param = "input"

    def __init__(self, request: Request, body: SpeechRequest) -> None:
        self._has_events = body.stream_format == "sse"
        media_type = EVENTS if self._has_events else AUDIO_FILES[body.response_format][0]
        super().__init__(request, body.model, is_streamed=True, media_type=media_type)
        self._stage = speaking_stage(self.stages, "model")
        check_voice(self.stages, body.voice, "voice")
        if body.ref_text is not None and body.ref_audio is None:
            raise ApiError.bad_field("ref_text", "is what ref_audio says, which is missing")
        if body.ref_audio is not None and any(one.speakers for one in self.stages.stages.values()):
            raise ApiError.bad_field("ref_audio", "this model speaks in voices of its own only")
        self._sampling = merge_sampling(self.stages, self._stage, {}, body.stages, {})
        self._body = body
        self._file = SpokenFile(body.response_format, body.speed)
        self._count = TokenCount()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the file as it is generated; its header cannot state the length."""
        counted = next(iter(self.stages.final_stages))  # counts tokens as in a chat
        body, prompt = self._body, await self._prompt()
        made = self.client.request(prompt, self._sampling, speaker=body.voice, **body.scheduling)
        async with self.stream([made], [self._stage]) as stream:
            async for update in stream.updates():
                if (delta := update.of(counted)) is not None:
                    self._count.add(delta)
                sound = update.sound(self._stage)
                if sound is None or not sound.duration_s:
                    continue
                # Encoding is slow; a thread keeps other responses running.
                if piece := await asyncio.to_thread(self._file.feed, sound):
                    yield self._piece(piece)
        if not self._file.has_begun:
            raise ApiError(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                "the model made no sound: its speech ended, or reached max_tokens, before any",
                code="no_sound",
                headers={"x-should-retry": "false"},  # clients retry automatically
            )
        if piece := await asyncio.to_thread(self._file.flush):
            yield self._piece(piece)
        if self._has_events:
            usage = usage_of([self._count])
            tokens = {
                "input_tokens": usage["prompt_tokens"],
                "output_tokens": usage["completion_tokens"],
                "total_tokens": usage["total_tokens"],
            }
            yield as_event({"type": "speech.audio.done", "usage": tokens})

    async def _prompt(self) -> Prompt:
        body = self._body
        messages: list[dict[str, Any]] = [{"role": "user", "content": body.input}]
        if body.instructions:
            messages.insert(0, {"role": "system", "content": body.instructions})
        prompt = ChatPrompt(tuple(messages))
        if body.ref_audio is None:
            return prompt
        room = self.server.settings.limits.max_body_bytes
        sound = await fetch_file(body.ref_audio, "ref_audio", self.server.fetcher, room)
        return speak_like(prompt, sound, body.ref_text)

    def _piece(self, content: bytes) -> bytes:
        # msgspec encodes bytes as base64.
        event = {"type": "speech.audio.delta", "audio": content}
        return as_event(event) if self._has_events else content
