"""Simulated tower output: repeated words, with silence between, and noise on every row."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

SILENCE = -1
"""Replaces a token id for a row without a word."""


def stutter(words: Sequence[int], strength: float, draw: random.Random) -> list[int]:
    """Draw a CTC path through words.

    Args:
        words: token ids.
        strength: from 0 (single words) to 1 (lengths and pauses as in speech).
        draw: for the lengths.

    Returns:
        Token ids and :data:`SILENCE`; equal consecutive words have silence between.
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
    """Return rows of a path, ``(len(path), width)``, plus ``noise`` times embeddings' deviation."""
    ids = torch.tensor(path)
    rows = torch.where((ids < 0).unsqueeze(1), silence, embedding[ids.clamp(min=0)])
    return rows + noise * embedding.std() * torch.randn_like(rows)
