"""The questions that figures are about: sums, voices and rates that training never has."""

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
        sum: what is asked.
        words: how.
        number: among the questions, from 0.
    """

    sum: Sum
    words: str
    number: int


@cache
def held_out_questions() -> tuple[HeldOutQuestion, ...]:
    """All 300; the same ones each time."""
    draw = random.Random(_SEED)
    sums = [
        draw.choice(held_out_sums(sign)) for sign, count in COUNTS.items() for _ in range(count)
    ]
    return tuple(
        HeldOutQuestion(each, draw.choice(_FORMS).format(each.words), number)
        for number, each in enumerate(sums)
    )


def say_held_out(folder: Path, *, every: int = 1) -> list[Path]:
    """Sound files of each so-many-th at 16 kHz, with the silence that espeak-ng leaves."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for question in held_out_questions()[::every]:
        path = folder / f"{question.number:03d}.wav"
        if not path.exists():
            voice = draw_voice(random.Random(_SEED + question.number), training=False)
            soundfile.write(path, speak(question.words, voice, cut=False).numpy(), SAMPLE_RATE)
        paths.append(path)
    return paths
