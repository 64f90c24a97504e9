"""Answers as tensors: sound and spectrogram of each, padded to whole codes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from training.spoken_sums.answers import (
    SAMPLING_RATE,
    SPEED,
    VOICES,
    Utterance,
    answer_texts,
    speak_all,
)
from training.spoken_sums.mel import HOP, mel_of

LEAD = 10
"""Codes of silence (20 ms each) before the first word, while the talker reads the reply."""

_SAMPLES_PER_CODE = 2 * HOP


@dataclass(frozen=True, slots=True, eq=False)
class Speech:
    """One answer.

    Attributes:
        utterance: text and voice.
        samples: ``(num_codes * 480,)`` float32.
        mel: ``(num_codes * 2, 80)`` float32.
    """

    utterance: Utterance
    samples: Tensor
    mel: Tensor


def answers_spoken(folder: Path, stretches: tuple[float, ...] = (SPEED,)) -> list[Speech]:
    """Return every answer in both voices at each speed."""
    wanted = [
        Utterance(text, voice, stretch)
        for stretch in stretches
        for voice in VOICES
        for text in answer_texts()
    ]
    return list(map(_speech, wanted, speak_all(wanted, folder / "answers.pt")))


def _speech(utterance: Utterance, samples: Tensor) -> Speech:
    lead = LEAD * _SAMPLES_PER_CODE - round(0.04 * SAMPLING_RATE)
    length = lead + len(samples)
    samples = pad(samples, (lead, -length % _SAMPLES_PER_CODE))
    with torch.no_grad():
        return Speech(utterance, samples, mel_of(samples))
