"""The one interface behind which attention runs, and what a step tells it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from prefix_cache import LayerKVCache

__all__ = ["AttentionBackend", "AttentionMetadata"]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What one step tells the attention layers of one KV-cache group.

    Requests are ordered with the decodes first (``query_len == 1``), so that a backend may
    treat the two kinds apart without sorting::

        tokens    | d0 | d1 | d2 | p0 p0 p0 | p1 p1 p1 p1 p1 |
        query_start_loc 0    1    2    3          6               11
                  └ num_decodes=3 ┘

    Attributes:
        query_start_loc: ``(num_reqs + 1,)`` int32 on the CPU: where each request's tokens start.
        seq_lens: ``(num_reqs,)`` int32 on the CPU: computed tokens plus this step's.
        block_table: ``(num_reqs, max_blocks)`` int32 on the device: logical to physical block;
            entries past a request's last block are 0, the null block.
        slot_mapping: ``(num_tokens,)`` int64 on the device: ``block_id * block_size + offset``.
        row_mapping: ``(num_tokens,)`` int64 on the device: the row of layer 0's key; see
            :mod:`prefix_cache.paged_memory`.
        num_decodes: how many of the leading requests have exactly one query token.
        max_query_len: longest query of the step.
        max_seq_len: longest sequence of the step.
        block_size: tokens per block.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    row_mapping: Tensor
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    block_size: int

    @property
    def num_reqs(self) -> int:
        """Requests in the step."""
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        """Tokens in the step, over all requests."""
        return self.slot_mapping.shape[0]


class AttentionBackend(ABC):
    """Computes attention of packed queries over paged keys and values.

    A backend holds no request state: everything comes with the call. ``begin_step`` is called
    once per step and group before the first layer, so that what all layers share (masks, gather
    indices) is made once; ``forward`` once per layer.
    """

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def check_support(cls, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
        """Raise ``ValueError`` that says what is needed if this combination cannot run."""

    @abstractmethod
    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Make what every layer of this step shares. Valid until the next call."""

    @abstractmethod
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: LayerKVCache,
        metadata: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        """Write this step's keys and values to their rows, then attend causally.

        Token i of a request whose sequence is ``s`` long after this step and that has ``q``
        query tokens sits at position ``s - q + i`` and sees positions ``0 .. s - q + i``.

        Args:
            query: ``(num_tokens, num_heads, head_dim)``.
            key: ``(num_tokens, num_kv_heads, head_dim)``; not repeated for grouped heads.
            value: as ``key``.
            kv_cache: this layer's views; rows of ``metadata.row_mapping`` are overwritten.
            metadata: the same object that ``begin_step`` got.
            scale: factor on the scores before the softmax.

        Returns:
            ``(num_tokens, num_heads, head_dim)``.
        """
