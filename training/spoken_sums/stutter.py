"""Words as a tower would hear them: repeated, with silence between, and noise on every row."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

SILENCE = -1
"""In the place of a token id: a row of no word."""


def stutter(words: Sequence[int], strength: float, draw: random.Random) -> list[int]:
    """A path through words as CTC has it.

    Args:
        words: token ids.
        strength: from 0, where words stand alone, to 1, where they last and rest as in speech.
        draw: of the lengths.

    Returns:
        Token ids and :data:`SILENCE`; equal words in a row have silence between.
    """

    def rests(most: int) -> list[int]:
        return [SILENCE] * draw.randint(0, round(most * strength))

    path = rests(30)
    for number, word in enumerate(words):
        if number and words[number - 1] == word and path[-1] == word:
            path.append(SILENCE)
        path += [word] * draw.randint(1, 1 + round(4 * strength))
        path += rests(12)
    return path + rests(35)


def noisy_rows(path: Sequence[int], embedding: Tensor, silence: Tensor, noise: float) -> Tensor:
    """Rows of a path, ``(len(path), width)``, each off by ``noise`` times a word's usual length."""
    ids = torch.tensor(path)
    rows = torch.where((ids < 0).unsqueeze(1), silence, embedding[ids.clamp(min=0)])
    return rows + noise * embedding.std() * torch.randn_like(rows)
