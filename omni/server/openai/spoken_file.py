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

    from engine.media.sound_file import Resampler

AudioFileFormat = Literal["wav", "mp3", "flac", "opus", "aac", "pcm"]

_PCM_RATE = 24_000
"""Clients take ``pcm`` for that many samples a second: nothing in it says how many there are."""

_LOUDEST = np.float32(2**15 - 1)

AUDIO_FILES: dict[AudioFileFormat, tuple[str, str, str, dict[str, str]]] = {
    "pcm": ("audio/pcm", "s16le", "pcm_s16le", {}),
    "wav": ("audio/wav", "wav", "pcm_s16le", {"fflags": "+bitexact"}),
    # Frames alone: whatever stands before them tells the length, which is not known yet.
    "mp3": ("audio/mpeg", "mp3", "libmp3lame", {"write_xing": "0", "id3v2_version": "0"}),
    "opus": ("audio/ogg", "ogg", "libopus", {"page_duration": "100000"}),  # µs, and else a second
    "aac": ("audio/aac", "adts", "aac", {}),
    "flac": ("audio/flac", "flac", "flac", {}),
}
"""The media type of each, and FFmpeg's names of the container and the codec, and its options."""


class SpokenPieces:
    """Makes samples of 16 bits of the sound of one answer, piece by piece, however it is cut.

    ``rate`` is how many a second; without one, as many as the pipeline makes. ``speed``, from 0.25
    to 4, is that of the speech, whose pitch it leaves.
    """

    def __init__(self, rate: int | None = None, speed: float = 1.0) -> None:
        self.rate = rate
        self._speed = speed
        self._tempo: Graph | None = None
        self._resampler: Resampler | None = None

    def of(self, sound: Waveform) -> bytes:
        """Convert sound that follows that before; perhaps to nothing yet, if it is changed."""
        samples, made = sound.encoded("pcm16"), sound.sampling_rate
        self.rate = self.rate or made
        if self._speed != 1.0 and samples:
            if self._tempo is None:
                self._tempo = _tempo(made, self._speed)
            samples = self._at_speed(_frame(samples, made))
        if self.rate != made and self._resampler is None:
            # Libraries for sound, which a server need not import before it answers.
            from engine.media.sound_file import Resampler

            self._resampler = Resampler(made, self.rate)
        return self._at_rate(samples)

    def rest(self) -> bytes:
        """Return what was held back until nothing more comes."""
        return self._at_rate(b"" if self._tempo is None else self._at_speed(None), last=True)

    def _at_speed(self, frame: AudioFrame | None) -> bytes:
        import av

        assert self._tempo is not None
        self._tempo.push(frame)
        parts = []
        while True:
            try:
                parts.append(self._tempo.pull().to_ndarray().tobytes())
            except (av.BlockingIOError, av.EOFError):
                return b"".join(parts)

    def _at_rate(self, samples: bytes, *, last: bool = False) -> bytes:
        if self._resampler is None:
            return samples
        given = np.frombuffer(samples, "<i2").astype(np.float32) / _LOUDEST
        made = self._resampler.resampled(given, last=last).clip(-1, 1) * _LOUDEST
        return bytes(np.rint(made).astype("<i2").tobytes())


def _tempo(rate: int, speed: float) -> Graph:
    """FFmpeg's filter of that name."""
    import av.filter

    graph = av.filter.Graph()
    # Each by a factor of 2 at most: beyond that the filter leaves some out, or takes no value.
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
    """Writes the sound of one answer as a file, which can be played while it is written.

    It has the sound's own rate, or the next one that the format has. Only FLAC comes in one piece:
    its head says how long it is.
    """

    def __init__(self, form: AudioFileFormat, speed: float = 1.0) -> None:
        self._form = form
        self._pieces = SpokenPieces(_PCM_RATE if form == "pcm" else None, speed)
        self._out, self._num_taken = io.BytesIO(), 0
        self._container: Any = None
        self._stream: Any = None

    @property
    def has_begun(self) -> bool:
        """Whether there was any sound."""
        return self._container is not None

    def of(self, sound: Waveform) -> bytes:
        """Write sound that follows that before; perhaps nothing yet."""
        samples = self._pieces.of(sound)
        if self._container is None:
            self._open(self._pieces.rate or sound.sampling_rate)
        self._encode(samples)
        return b"" if self._form == "flac" else self._new()

    def rest(self) -> bytes:
        """Write what was held back until nothing more comes."""
        self._encode(self._pieces.rest())
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._new()

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

    def _new(self) -> bytes:
        new = bytes(self._out.getbuffer()[self._num_taken :])
        self._num_taken += len(new)
        return new
