"""Which of its sequence's keys each query token of a step sees, as the paged kernel reads it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PagedSpans"]


@dataclass(frozen=True, slots=True)
class PagedSpans:
    """A span of positions per query token, the same for all layers of a step.

    The kernel follows the table's entries and the spans blindly: who makes them checks them.

    Attributes:
        block_table: ``(num_reqs, blocks)`` int32, contiguous.
        spans: ``(3, num_tokens)`` int32, rows may be a stride apart: of each token, its request's
            row in the table, the first position that it sees, and one past the last.
        num_parts: parts into which the keys of each token are cut, to run in parallel.
    """

    block_table: Tensor
    spans: Tensor
    num_parts: int = 1

    def __post_init__(self) -> None:
        table, spans = self.block_table, self.spans
        if table.dtype != torch.int32 or table.ndim != 2 or not table.is_contiguous():
            raise ValueError(
                f"expected a contiguous int32 block table (num_reqs, blocks), got {table.dtype} "
                f"{tuple(table.shape)}, strides {table.stride()}"
            )
        if spans.dtype != torch.int32 or spans.shape[0] != 3 or spans.stride(1) != 1:
            raise ValueError(
                f"expected int32 spans (3, num_tokens), got {spans.dtype} {tuple(spans.shape)}"
            )

    @property
    def num_tokens(self) -> int:
        """Query tokens."""
        return self.spans.shape[1]
