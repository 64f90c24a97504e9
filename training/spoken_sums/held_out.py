"""Evaluation questions: sums, voices and rates that do not occur in training."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import soundfile

from training.spoken_sums.log_mel import SAMPLE_RATE
from training.spoken_sums.questions import draw_voice, speak
from training.spoken_sums.sums import Sign, Sum, held_out_sums

COUNTS: dict[Sign, int] = {"+": 150, "-": 90, "*": 60}
_FORMS = ("{}", "{}", "what is {}", "how much is {}")
_SEED = 300


@dataclass(frozen=True, slots=True)
class HeldOutQuestion:
    """One question.

    Attributes:
        sum: the sum.
        words: its wording.
        number: index among the questions, from 0.
    """

    sum: Sum
    words: str
    number: int


@cache
def held_out_questions() -> tuple[HeldOutQuestion, ...]:
    """Return all 300 questions; deterministic."""
    draw = random.Random(_SEED)
    sums = [
        draw.choice(held_out_sums(sign)) for sign, count in COUNTS.items() for _ in range(count)
    ]
    return tuple(
        HeldOutQuestion(each, draw.choice(_FORMS).format(each.words), number)
        for number, each in enumerate(sums)
    )


def say_held_out(folder: Path, *, every: int = 1) -> list[Path]:
    """Write every n-th question at 16 kHz, with espeak-ng's silence; return the sound files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for question in held_out_questions()[::every]:
        path = folder / f"{question.number:03d}.wav"
        if not path.exists():
            voice = draw_voice(random.Random(_SEED + question.number), training=False)
            soundfile.write(path, speak(question.words, voice, cut=False).numpy(), SAMPLE_RATE)
        paths.append(path)
    return paths
