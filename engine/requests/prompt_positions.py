"""Rotary positions that have several axes: time, height and width of what a token shows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PromptPositions"]


@dataclass(frozen=True, slots=True, eq=False)
class PromptPositions:
    """Where the tokens of one request lie on each axis.

    ::

        prompt      a  b  [ image of 2 x 2 ]  c       generated
        time        0  1   2  2  2  2         4        5  6 ...    the same on all axes, from the
        height      0  1   2  2  3  3         4        5  6 ...    number on that follows those
        width       0  1   2  3  2  3         4        5  6 ...    of the last prompt token

    Attributes:
        table: ``(axes, num_prompt_tokens)`` int64 on the host.
        shift: what generated tokens' places in the sequence are off by.
    """

    table: Tensor
    shift: int

    @classmethod
    def of(cls, table: Tensor) -> PromptPositions:
        """Work out the shift from a prompt's table: what was generated may be prompt next time."""
        return cls(table, int(table[:, -1].max()) + 1 - table.shape[1])

    @property
    def largest(self) -> int:
        """Largest place of a prompt token on any axis."""
        return int(self.table.max())

    def cut(self, start: int, stop: int) -> Tensor:
        """Positions ``(axes, stop - start)`` of the tokens from ``start`` on."""
        axes, num_prompt_tokens = self.table.shape
        prompt = self.table[:, start:stop]
        generated = torch.arange(max(start, num_prompt_tokens), max(stop, num_prompt_tokens))
        return torch.cat([prompt, (generated + self.shift).expand(axes, -1)], dim=1)
