"""Texts of the spoken training questions."""

from __future__ import annotations

import random

from training.spoken_sums.conversations import draw_sum, follow_up_words, spoken_form
from training.spoken_sums.other_words import draw_other
from training.spoken_sums.sums import LARGEST_ASKED, SIGNS, Sum


def question_texts(count: int, *, seed: int) -> list[str]:
    """Draw texts: of six, about four are sums, one is a follow-up, and one is not a sum."""
    draw = random.Random(seed)
    texts: list[str] = []
    for _ in range(count):
        kind = draw.random()
        if kind < 0.66:
            texts.append(spoken_form(draw_sum(draw), draw))
        elif kind < 0.84:
            one = Sum(0, draw.choice(SIGNS), draw.randint(0, LARGEST_ASKED))
            texts.append(follow_up_words(one, draw))
        else:
            texts.append(draw_other(draw))
    return texts
