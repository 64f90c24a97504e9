"""The sound of an answer, written piece by piece in the formats of OpenAI's API."""

from __future__ import annotations

import io
import math
import struct
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from engine import Waveform

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.media.sound_file import Resampler

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

_UNKNOWN_BYTES = 0xFFFFFFFF

# FFmpeg's names of a container and a codec, and options of the container.
_FFMPEG = {
    # Frames alone: whatever stands before them tells the length, which is not known yet.
    "mp3": ("mp3", "libmp3lame", {"write_xing": "0", "id3v2_version": "0"}),
    "opus": ("ogg", "libopus", {"page_duration": "100000"}),  # microseconds, and else a second
    "aac": ("adts", "aac", {}),
    "flac": ("flac", "flac", {}),
}


class SpokenPieces:
    """Makes samples of 16 bits of the sound of one answer, piece by piece.

    ``rate`` is how many a second; without one, as many as the pipeline makes. ``speed``, from 0.25
    to 4, is that of the speech, whose pitch it leaves.
    """

    def __init__(self, rate: int | None = None, speed: float = 1.0) -> None:
        self.rate = rate
        self._speed = speed
        self._tempo: _Tempo | None = None
        self._resampler: Resampler | None = None

    def of(self, sound: Waveform) -> bytes:
        """Convert sound that follows that before; perhaps to nothing yet, if it is changed."""
        made = sound.sampling_rate
        self.rate = self.rate or made
        if self.rate == made and self._speed == 1.0:
            return sound.encoded("pcm16")
        if self._resampler is None:
            # Libraries for sound, which a server need not import before it answers.
            from engine.media.sound_file import Resampler

            self._resampler = Resampler(made, self.rate)
            self._tempo = _Tempo(made, self._speed) if self._speed != 1.0 else None
        samples = sound.samples.float().numpy(force=True)
        if self._tempo is not None:
            samples = self._tempo.changed(samples)
        return self._samples(self._resampler.resampled(samples))

    def rest(self) -> bytes:
        """Return what was held back until nothing more comes."""
        if self._resampler is None:
            return b""
        last = self._tempo.changed(None) if self._tempo is not None else np.zeros(0, np.float32)
        return self._samples(self._resampler.resampled(last, last=True))

    def _samples(self, samples: NDArray[np.float32]) -> bytes:
        import torch  # a server answers before it is imported

        assert self.rate is not None
        return Waveform(torch.from_numpy(samples), self.rate).encoded("pcm16")


class _Tempo:
    """Makes speech faster or slower by FFmpeg's filter ``atempo``, however it is cut."""

    def __init__(self, rate: int, speed: float) -> None:
        import av.filter

        self._rate, self._num_fed = rate, 0
        self._graph = av.filter.Graph()
        # Each by a factor of 2 at most: beyond that the filter leaves some out, or takes no value.
        num_steps = math.ceil(abs(math.log2(speed)))
        steps = [self._graph.add("atempo", f"{speed ** (1 / num_steps)}") for _ in range(num_steps)]
        source = self._graph.add_abuffer(sample_rate=rate, format="flt", layout="mono")
        self._graph.link_nodes(source, *steps, self._graph.add("abuffersink")).configure()

    def changed(self, samples: NDArray[np.float32] | None) -> NDArray[np.float32]:
        """Take the next samples, ``(n,)``, or None at the end; return what they make certain."""
        import av

        if samples is None:
            self._graph.push(None)
        elif len(samples):
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples)[None], "flt", "mono")
            frame.sample_rate, frame.pts = self._rate, self._num_fed
            self._num_fed += len(samples)
            self._graph.push(frame)
        parts = [np.zeros(0, np.float32)]
        while True:
            try:
                parts.append(self._graph.pull().to_ndarray()[0])
            except (av.BlockingIOError, av.EOFError):
                return np.concatenate(parts)


class SpokenFile:
    """Writes the sound of one answer as a file, which can be played while it is written.

    Only FLAC comes in one piece: its head says how long it is.
    """

    def __init__(self, form: AudioFileFormat, speed: float = 1.0) -> None:
        self._form = form
        self._pieces = SpokenPieces(_PCM_RATE if form == "pcm" else None, speed)
        self._encoder: _Encoder | None = None
        self.has_begun = False

    def of(self, sound: Waveform) -> bytes:
        """Write sound that follows that before; perhaps nothing yet."""
        return self._written(self._pieces.of(sound), sound.sampling_rate)

    def rest(self) -> bytes:
        """Write what was held back until nothing more comes."""
        assert self._pieces.rate is not None
        written = self._written(self._pieces.rest(), self._pieces.rate)
        return written if self._encoder is None else written + self._encoder.end()

    def _written(self, samples: bytes, rate: int) -> bytes:
        is_first, self.has_begun = not self.has_begun, True
        if self._form == "pcm":
            return samples
        if self._form == "wav":
            return (_wav_stream_header(rate) if is_first else b"") + samples
        if self._encoder is None:
            self._encoder = _Encoder(self._form, rate)
        return self._encoder.encoded(samples)


def _wav_stream_header(sampling_rate: int) -> bytes:
    """Write the head of a WAV file of mono samples of 16 bits whose length is not known yet."""
    form = (16, 1, 1, sampling_rate, 2 * sampling_rate, 2, 16)
    return struct.pack(
        "<4sI8sIHHIIHH4sI", b"RIFF", _UNKNOWN_BYTES, b"WAVEfmt ", *form, b"data", _UNKNOWN_BYTES
    )


class _Sink(io.RawIOBase):
    """Gathers what a container writes until it is taken."""

    def __init__(self) -> None:
        self.written = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.written += bytes(data)
        return len(data)

    def take(self) -> bytes:
        taken, self.written = self.written, b""
        return taken


class _Encoder:
    """Compresses samples of 16 bits by FFmpeg, at the next rate that the codec has."""

    def __init__(self, form: AudioFileFormat, rate: int) -> None:
        import av

        container, codec, options = _FFMPEG[form]
        rates = av.codec.Codec(codec, "w").audio_rates or [rate]
        self._rate = rate
        self._out = io.BytesIO() if form == "flac" else _Sink()
        self._container = av.open(self._out, "w", format=container, options=options)
        at_rate = min((each for each in rates if each >= rate), default=max(rates))
        self._stream: Any = self._container.add_stream(codec, rate=at_rate, layout="mono")

    def encoded(self, samples: bytes) -> bytes:
        """Take the next samples, and return what they make certain."""
        import av

        if samples:
            frame = av.AudioFrame.from_ndarray(np.frombuffer(samples, "<i2")[None], "s16", "mono")
            frame.sample_rate = self._rate
            self._container.mux(self._stream.encode(frame))
        return self._out.take() if isinstance(self._out, _Sink) else b""

    def end(self) -> bytes:
        """Return what is left."""
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._out.take() if isinstance(self._out, _Sink) else self._out.getvalue()
