"""Sound, as a vocoder makes it."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from engine.interface.hints import Tensor

__all__ = ["Waveform"]

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
