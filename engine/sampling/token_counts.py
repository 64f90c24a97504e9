"""Which tokens a request has seen, and how often it generated each."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

__all__ = ["TokenCounts"]

_SPARE = 64


class TokenCounts:
    """Sparse counts: one entry per distinct token of the prompt and the output.

    Args:
        prompt_token_ids: seen, but not counted as generated.
    """

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        distinct = np.array(sorted(set(prompt_token_ids)), dtype=np.int64)
        self._slots = {int(token_id): slot for slot, token_id in enumerate(distinct)}
        self._ids = np.concatenate([distinct, np.zeros(_SPARE, dtype=np.int64)])
        self._generated = np.zeros(len(self._ids), dtype=np.float32)

    def see(self, token_ids: Iterable[int]) -> None:
        """Take note of more tokens of the prompt."""
        for token_id in token_ids:
            if token_id not in self._slots:
                self._add(token_id)

    def append(self, token_id: int) -> None:
        """Count one generated token."""
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._add(token_id)
        self._generated[slot] += 1

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """``(num_distinct,)`` ids, each once."""
        return self._ids[: len(self._slots)]

    @property
    def generated(self) -> NDArray[np.float32]:
        """``(num_distinct,)``: how often each was generated; 0 for one of the prompt only."""
        return self._generated[: len(self._slots)]

    def _add(self, token_id: int) -> int:
        slot = len(self._slots)
        if slot == len(self._ids):
            # Doubled, so that appending stays cheap however long the output gets.
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._generated = np.concatenate([self._generated, np.zeros_like(self._generated)])
        self._ids[slot] = token_id
        self._slots[token_id] = slot
        return slot
