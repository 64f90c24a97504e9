"""Attention written to be obviously right: the oracle of all other backends. Never fast."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend, AttentionMetadata
from engine.attention.paged_rows import write_kv
from prefix_cache import LayerKVCache

__all__ = ["ReferenceBackend", "causal_mask"]


def causal_mask(query_len: int, seq_len: int) -> Tensor:
    """Who sees whom when the queries are the last tokens of a sequence.

    For 2 queries in a sequence of 5 (``x``: seen)::

        key      0 1 2 3 4
        query 3  x x x x .
        query 4  x x x x x

    Returns:
        ``(query_len, seq_len)`` booleans, True where query i may see key j.
    """
    query_positions = torch.arange(seq_len - query_len, seq_len)
    return query_positions[:, None] >= torch.arange(seq_len)[None, :]


class ReferenceBackend(AttentionBackend):
    """Per request: all keys, the whole mask, one softmax, in float64. Any device."""

    name: ClassVar[str] = "reference"

    @classmethod
    def check_support(cls, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
        """Everything is supported."""

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Nothing is shared between layers."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: LayerKVCache,
        metadata: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        """See :meth:`AttentionBackend.forward`."""
        write_kv(key, value, kv_cache, metadata.row_mapping)
        output = torch.empty_like(query)
        for request in range(metadata.num_reqs):
            start, end = metadata.query_start_loc[request : request + 2].tolist()
            seq_len = int(metadata.seq_lens[request])
            keys, values = _sequence_rows(kv_cache, metadata.block_table[request], seq_len)
            mask = causal_mask(end - start, seq_len).to(query.device)
            output[start:end] = _attend(query[start:end], keys, values, mask, scale)
        return output


def _sequence_rows(
    kv_cache: LayerKVCache, block_ids: Tensor, seq_len: int
) -> tuple[Tensor, Tensor]:
    """A sequence's keys and values ``(seq_len, num_kv_heads, head_dim)``, in order."""
    key_chunks = block_ids * kv_cache.chunks_per_page + 2 * kv_cache.layer_index
    keys = kv_cache.chunks[key_chunks].flatten(0, 1)
    values = kv_cache.chunks[key_chunks + 1].flatten(0, 1)
    return keys[:seq_len], values[:seq_len]


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    queries_per_kv_head = query.shape[1] // keys.shape[1]
    keys = keys.double().repeat_interleave(queries_per_kv_head, dim=1)
    values = values.double().repeat_interleave(queries_per_kv_head, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
