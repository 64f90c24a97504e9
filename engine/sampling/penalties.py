"""Changes to single logits of a batch: biases, masks and penalties, without a loop over tokens.

Every row brings a short list of ids. All rows' lists are joined into one list of places in the
flat ``(n * vocab,)`` view, so that a whole batch is one gather and one scatter::

    row 0: ids 7, 9    row 2: ids 0, 7, 8        vocab = 10
    places = [7, 9,            20, 27, 28]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.sampling_state import SamplingState

__all__ = ["apply_biases", "apply_masks", "apply_penalties"]


def apply_biases(logits: Tensor, states: Sequence[SamplingState]) -> None:
    """Add what requests want added to single tokens' logits, in place.

    Args:
        logits: ``(n, vocab)`` float32, contiguous.
        states: one per row.
    """
    biased = [(row, state.bias) for row, state in enumerate(states) if state.bias is not None]
    if not biased:
        return
    places = _places([row for row, _ in biased], [bias.token_ids for _, bias in biased], logits)
    values = np.concatenate([bias.values for _, bias in biased])
    logits.view(-1)[places] += torch.from_numpy(values).to(logits.device)


def apply_masks(logits: Tensor, states: Sequence[SamplingState]) -> None:
    """Set what must not be chosen to minus infinity, in place.

    Args:
        logits: ``(n, vocab)``, contiguous.
        states: one per row.
    """
    masked = [
        (row, ids) for row, state in enumerate(states) if (ids := state.masked_ids) is not None
    ]
    if masked:
        places = _places([row for row, _ in masked], [ids for _, ids in masked], logits)
        logits.view(-1).index_fill_(0, places, -torch.inf)


def apply_penalties(logits: Tensor, states: Sequence[SamplingState]) -> None:
    """Apply repetition, then frequency and presence penalties, in place.

    The first looks at prompt and output (CTRL, Keskar et al. 2019), the others at the output only.

    Args:
        logits: ``(n, vocab)`` float32, contiguous.
        states: one per row.
    """
    penalised = [
        (row, state.params, state.counts)
        for row, state in enumerate(states)
        if state.counts is not None
    ]
    if not penalised:
        return
    ids = [counts.token_ids for _, _, counts in penalised]
    places = _places([row for row, _, _ in penalised], ids, logits)
    lengths = [len(row_ids) for row_ids in ids]

    def per_token(values: list[float]) -> Tensor:
        repeated = np.repeat(np.array(values, dtype=np.float32), lengths)
        return torch.from_numpy(repeated).to(logits.device)

    repetition = per_token([params.repetition_penalty for _, params, _ in penalised])
    frequency = per_token([params.frequency_penalty for _, params, _ in penalised])
    presence = per_token([params.presence_penalty for _, params, _ in penalised])
    generated = torch.from_numpy(
        np.concatenate([counts.generated for _, _, counts in penalised])
    ).to(logits.device)

    values = logits.view(-1)[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * generated + presence * (generated > 0)
    logits.view(-1)[places] = values


def _places(rows: list[int], ids: list[NDArray[np.int64]], logits: Tensor) -> Tensor:
    vocab_size = logits.shape[1]
    joined = np.concatenate(
        [row * vocab_size + row_ids for row, row_ids in zip(rows, ids, strict=True)]
    )
    return torch.from_numpy(joined).to(logits.device)
