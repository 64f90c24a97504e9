"""The one interface behind which attention runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from engine.attention.metadata import AttentionMetadata, Scoring
from prefix_cache import LayerKVCache

__all__ = ["AttentionBackend", "LayerCall"]


class LayerCall(NamedTuple):
    """One layer's attention in one step.

    Attributes:
        query: ``(num_tokens, num_heads, head_dim)``.
        key: ``(num_written, num_kv_heads, head_dim)``; not repeated for grouped heads.
        value: as ``key``.
        kv_cache: this layer's views; rows of ``metadata.row_mapping`` are overwritten.
        metadata: the same object that ``begin_step`` got.
        scoring: how this layer's products become scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    kv_cache: LayerKVCache
    metadata: AttentionMetadata
    scoring: Scoring


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
    def forward(self, call: LayerCall) -> Tensor:
        """Write this step's keys and values to their rows, then attend.

        Token i of a request whose sequence is ``s`` long after this step and that has ``q``
        query tokens sits at position ``s - q + i`` and sees positions ``0 .. s - q + i``, or of
        them those that ``metadata.window`` and ``metadata.chunk_size`` leave; see
        :mod:`engine.attention.metadata`. Without ``metadata.causal`` it sees ``0 .. s - 1``.

        Returns:
            ``(num_tokens, num_heads, head_dim)``.
        """
