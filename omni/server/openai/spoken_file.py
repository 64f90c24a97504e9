"""The sound of an answer, written piece by piece in the formats of OpenAI's API."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from engine import Waveform

if TYPE_CHECKING:
    from av import AudioFrame
    from av.filter import Graph

AudioFileFormat = Literal["wav", "mp3", "flac", "opus", "aac", "pcm"]

AUDIO_TYPES: dict[AudioFileFormat, str] = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "pcm": "application/octet-stream",
}

_PCM_RATE = 24_000
"""Clients take ``pcm`` for that many samples a second: nothing in it says how many there are."""

# FFmpeg's names of a container and a codec, and options of the container.
_FFMPEG = {
    # Frames alone: whatever stands before them tells the length, which is not known yet.
    "pcm": ("s16le", "pcm_s16le", {}),
    "wav": ("wav", "pcm_s16le", {"fflags": "+bitexact"}),
    "mp3": ("mp3", "libmp3lame", {"write_xing": "0", "id3v2_version": "0"}),
    "opus": ("ogg", "libopus", {"page_duration": "100000"}),  # microseconds, and else a second
    "aac": ("adts", "aac", {}),
    "flac": ("flac", "flac", {}),
}


class SpokenPieces:
    """Makes samples of 16 bits of the sound of one answer, piece by piece, however it is cut.

    ``rate`` is how many a second; without one, as many as the pipeline makes. ``speed``, from 0.25
    to 4, is that of the speech, whose pitch it leaves.
    """

    def __init__(self, rate: int | None = None, speed: float = 1.0) -> None:
        self.rate = rate
        self._speed = speed
        self._graph: Graph | None = None

    def of(self, sound: Waveform) -> bytes:
        """Convert sound that follows that before; perhaps to nothing yet, if it is changed."""
        samples, made = sound.encoded("pcm16"), sound.sampling_rate
        self.rate = self.rate or made
        if self.rate == made and self._speed == 1.0:
            return samples
        if self._graph is None:
            self._graph = _graph(made, self.rate, self._speed)
        return self._passed(_frame(samples, made)) if samples else b""

    def rest(self) -> bytes:
        """Return what was held back until nothing more comes."""
        return b"" if self._graph is None else self._passed(None)

    def _passed(self, frame: AudioFrame | None) -> bytes:
        import av

        assert self._graph is not None
        self._graph.push(frame)
        parts = []
        while True:
            try:
                parts.append(self._graph.pull().to_ndarray().tobytes())
            except (av.BlockingIOError, av.EOFError):
                return b"".join(parts)


def _graph(rate: int, wanted: int, speed: float) -> Graph:
    """What changes tempo and rate: filters of FFmpeg, which a server imports when it speaks."""
    import av.filter

    graph = av.filter.Graph()
    # Each by a factor of 2 at most: beyond that the filter leaves some out, or takes no value.
    num_steps = math.ceil(abs(math.log2(speed)))
    steps = [graph.add("atempo", f"{speed ** (1 / num_steps)}") for _ in range(num_steps)]
    source = graph.add_abuffer(sample_rate=rate, format="s16", layout="mono")
    ends = graph.add("aresample", f"{wanted}"), graph.add("abuffersink")
    graph.link_nodes(source, *steps, *ends).configure()
    return graph


def _frame(samples: bytes, rate: int) -> AudioFrame:
    import av

    frame = av.AudioFrame.from_ndarray(np.frombuffer(samples, "<i2")[None], "s16", "mono")
    frame.sample_rate = rate
    return frame


class SpokenFile:
    """Writes the sound of one answer as a file, which can be played while it is written.

    It has the sound's own rate, or the next one that the format has. Only FLAC comes in one piece:
    its head says how long it is.
    """

    def __init__(self, form: AudioFileFormat, speed: float = 1.0) -> None:
        self._form = form
        self._pieces = SpokenPieces(speed=speed)
        self._out, self._num_taken = io.BytesIO(), 0
        self._container: Any = None
        self._stream: Any = None

    @property
    def has_begun(self) -> bool:
        """Whether there was any sound."""
        return self._container is not None

    def of(self, sound: Waveform) -> bytes:
        """Write sound that follows that before; perhaps nothing yet."""
        if self._container is None:
            self._open(sound.sampling_rate)
        self._encode(self._pieces.of(sound))
        return b"" if self._form == "flac" else self._new()

    def rest(self) -> bytes:
        """Write what was held back until nothing more comes."""
        self._encode(self._pieces.rest())
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._new()

    def _open(self, rate: int) -> None:
        import av

        container, codec, options = _FFMPEG[self._form]
        rates = av.codec.Codec(codec, "w").audio_rates or [rate]
        if self._form == "pcm":
            rates = [_PCM_RATE]
        at_rate = min((each for each in rates if each >= rate), default=max(rates))
        self._container = av.open(self._out, "w", format=container, options=options)
        self._stream = self._container.add_stream(codec, rate=at_rate, layout="mono")

    def _encode(self, samples: bytes) -> None:
        if samples:
            assert self._pieces.rate is not None
            self._container.mux(self._stream.encode(_frame(samples, self._pieces.rate)))

    def _new(self) -> bytes:
        new = bytes(self._out.getbuffer()[self._num_taken :])
        self._num_taken += len(new)
        return new
