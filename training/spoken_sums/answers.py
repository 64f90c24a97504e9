"""Answers spoken by flite: the only training data of talker and vocoder."""

from __future__ import annotations

import subprocess
import tempfile
import wave
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soxr
import torch
from torch import Tensor

from training.spoken_sums.number_words import LARGEST, in_words
from training.spoken_sums.sums import NOT_A_SUM

SAMPLING_RATE = 24_000
"""Sampling rate of the family's vocoder, in Hz."""

VOICES = ("slt", "rms")
"""flite voices, a woman and a man. A recognizer understands them, unlike espeak's teens."""

SPEED = 1.0
"""Duration factor of flite's sounds: the voice's own speed."""

_FLITE_RATE = 16_000
_SILENCE = 0.004
_EDGE = 0.04


def answer_texts() -> list[str]:
    """Return all possible answers: the numbers from 0 to 200, and the one sentence."""
    return [*map(in_words, range(LARGEST + 1)), NOT_A_SUM]


@dataclass(frozen=True, slots=True)
class Utterance:
    """A text, its voice, and the duration factor of its sounds (1 is the voice's own speed)."""

    text: str
    voice: str
    stretch: float = SPEED


def speak(utterance: Utterance) -> Tensor:
    """Synthesize ``(num_samples,)`` float32 in -1 to 1 at 24 kHz, with silent edges cut.

    Raises:
        FileNotFoundError: flite is not installed.
        subprocess.CalledProcessError: flite failed.
    """
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        stretch = f"duration_stretch={utterance.stretch}"
        command = ["flite", "-voice", utterance.voice, "--setf", stretch]
        subprocess.run([*command, "-t", utterance.text, "-o", file.name], check=True)
        with wave.open(file.name) as recording:
            if recording.getframerate() != _FLITE_RATE:
                raise ValueError(f"flite speaks at {recording.getframerate()} Hz, not 16,000")
            samples = np.frombuffer(recording.readframes(recording.getnframes()), dtype=np.int16)
    return torch.from_numpy(_cut(soxr.resample(samples / 32768, _FLITE_RATE, SAMPLING_RATE)))


def speak_all(utterances: list[Utterance], cache: Path, num_workers: int = 1) -> list[Tensor]:
    """Synthesize utterances, or read them from the cache (a file of tensors)."""
    known: dict[Utterance, Tensor] = {}
    if cache.is_file():
        stored = torch.load(cache, weights_only=True)
        known = {Utterance(*key): sound for key, sound in stored}
    missing = [utterance for utterance in dict.fromkeys(utterances) if utterance not in known]
    if missing:
        with ThreadPoolExecutor(num_workers) as pool:
            known.update(zip(missing, pool.map(speak, missing), strict=True))
        rows = [((key.text, key.voice, key.stretch), sound) for key, sound in known.items()]
        torch.save(rows, cache)
    return [known[utterance] for utterance in utterances]


def _cut(samples: np.ndarray) -> np.ndarray:
    """Leave 40 ms of silence at both ends, so that equal words start at equal positions."""
    loud = np.flatnonzero(np.abs(samples) > _SILENCE)
    edge = round(_EDGE * SAMPLING_RATE)
    if not len(loud):
        raise ValueError("flite said nothing")
    start, stop = max(loud[0] - edge, 0), loud[-1] + edge
    return samples[start:stop].astype(np.float32)
