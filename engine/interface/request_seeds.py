"""Seeds of requests that bring none."""

from __future__ import annotations

import torch

__all__ = ["RequestSeeds"]


class RequestSeeds:
    """One after another, in the order in which requests come: the same wherever a stage runs.

    Args:
        seed: an engine's own.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> int:
        """The next one, below 2 ** 62."""
        return int(torch.randint(2**62, (), generator=self._generator))
