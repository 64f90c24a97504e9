"""Evaluation conversations and sums out of range, which do not occur in training."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import soundfile

from training.spoken_sums.conversations import follow_up_words
from training.spoken_sums.log_mel import SAMPLE_RATE
from training.spoken_sums.questions import draw_voice, speak
from training.spoken_sums.sums import SIGNS, Sum, follow_ups, held_out_sums, out_of_range

_COUNT = 60
_SEED = 400


@dataclass(frozen=True, slots=True)
class HeldOutTalk:
    """A question, and one that continues from its result.

    Attributes:
        first: the first sum.
        then: the sum that starts from its result.
        words: the wording of both.
        number: index among the conversations, from 0.
    """

    first: Sum
    then: Sum
    words: tuple[str, str]
    number: int


@cache
def held_out_talks() -> tuple[HeldOutTalk, ...]:
    """Return all 60 conversations; deterministic."""
    draw = random.Random(_SEED)
    talks: list[HeldOutTalk] = []
    while len(talks) < _COUNT:
        first = draw.choice(held_out_sums(draw.choice(SIGNS)))
        assert first.result is not None
        following = follow_ups(first.result, draw.choice(SIGNS), training=False)
        if following:
            then = draw.choice(following)
            words = first.words, follow_up_words(then, draw)
            talks.append(HeldOutTalk(first, then, words, len(talks)))
    return tuple(talks)


@cache
def held_out_out_of_range() -> tuple[Sum, ...]:
    """Return forty differences and forty products out of range, half of them by a small margin."""
    draw = random.Random(_SEED)
    chosen: list[Sum] = []
    for sign in SIGNS:
        every = sorted(out_of_range(sign, training=False), key=lambda one: one.off)
        if every:
            chosen += every[:20] + draw.sample(every[20:], 20)
    return tuple(chosen)


def say_held_out_talks(folder: Path, *, every: int = 1) -> list[tuple[Path, Path]]:
    """Write sound files of both questions, with one held-out voice for both; return paths."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs: list[tuple[Path, Path]] = []
    for talk in held_out_talks()[::every]:
        voice = draw_voice(random.Random(_SEED + talk.number), training=False)
        first, then = (folder / f"{talk.number:03d}_{turn}.wav" for turn in (1, 2))
        for path, words in zip((first, then), talk.words, strict=True):
            if not path.exists():
                soundfile.write(path, speak(words, voice, cut=False).numpy(), SAMPLE_RATE)
        pairs.append((first, then))
    return pairs
