"""Attention written to be obviously right: the oracle for all other backends. Never fast."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from engine.attention.metadata import (
    AttentionBackend,
    AttentionMetadata,
    LayerCall,
    Scoring,
    write_kv,
)
from prefix_cache import LayerKVCache


def visibility_mask(
    query_len: int,
    seq_len: int,
    window: int | None = None,
    causal: bool = True,
    visible_ends: Tensor | None = None,
) -> Tensor:
    """Return which keys each query sees when the queries are the last tokens of a sequence.

    For 2 queries in a sequence of 5 (``x``: visible)::

                          with a window of 3   not causal
        key      0 1 2 3 4      0 1 2 3 4       0 1 2 3 4
        query 3  x x x x .      . x x x .       x x x x x
        query 4  x x x x x      . . x x x       x x x x x

    Returns:
        ``(query_len, seq_len)`` booleans, True where query i may see key j.
    """
    if not causal:
        return torch.ones(query_len, seq_len, dtype=torch.bool)
    queries = torch.arange(seq_len - query_len, seq_len)[:, None]
    keys = torch.arange(seq_len)[None, :]
    visible = keys <= queries if visible_ends is None else keys < visible_ends[:, None]
    if window is not None:
        visible &= keys > queries - window
    return visible


class ReferenceBackend(AttentionBackend):
    """Per request: all keys, the whole mask, one softmax, in float64. Any device."""

    name: ClassVar[str] = "reference"

    @classmethod
    def check_support(cls, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
        """Everything is supported."""

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Nothing is shared between layers."""

    def forward(self, call: LayerCall) -> Tensor:
        """See :meth:`AttentionBackend.forward`."""
        query, key, value, kv_cache, metadata, scoring = call
        write_kv(key, value, kv_cache, metadata.row_mapping)
        output = torch.zeros_like(query)
        for request in range(metadata.num_reqs):
            start, end = metadata.query_start_loc[request : request + 2].tolist()
            seq_len = int(metadata.seq_lens[request])
            if seq_len == 0:  # of an encoder: there is nothing to see
                continue
            ends = None if metadata.visible_ends is None else metadata.visible_ends[start:end]
            mask = visibility_mask(end - start, seq_len, metadata.window, metadata.causal, ends)
            # No query sees earlier rows: they may be freed, and must not even be read.
            first = int(mask.any(dim=0).nonzero()[0])
            keys, values = _sequence_rows(
                kv_cache, metadata.block_table[request], metadata.block_size, first, seq_len
            )
            mask = mask[:, first:].to(query.device)
            output[start:end] = _attend(query[start:end], keys, values, mask, scoring)
        return output


def _sequence_rows(
    kv_cache: LayerKVCache, block_ids: Tensor, block_size: int, first: int, end: int
) -> tuple[Tensor, Tensor]:
    """Return keys and values of ``first .. end - 1``, each ``(n, num_kv_heads, head_dim)``."""
    positions = torch.arange(first, end, device=block_ids.device)
    key_chunks = block_ids[positions // block_size].long() * kv_cache.chunks_per_page
    key_chunks += 2 * kv_cache.layer_index
    offsets = positions % block_size
    return kv_cache.chunks[key_chunks, offsets], kv_cache.chunks[key_chunks + 1, offsets]


def _bias_of(bias: Tensor, num_queries: int, num_keys: int) -> Tensor:
    """Return ``(num_heads, num_queries, num_keys)``; distances are clipped to the last column."""
    queries = torch.arange(num_keys - num_queries, num_keys)[:, None]
    distances = (queries - torch.arange(num_keys)).clamp(0, bias.shape[1] - 1)
    return bias[:, distances.to(bias.device)].double()


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    """Attend from the sequence's last tokens to its keys; ``mask`` is ``(queries, keys)``."""
    if keys.isfinite().all() and values.isfinite().all():
        return _attend_masked(query, keys, values, mask, scoring)
    # Each query over only its visible keys: a weight of 0 would not hide NaN. The last visible key
    # is the query's own, or an encoder's last, so that distances stay unchanged.
    rows = [
        _attend_masked(query[i : i + 1], keys[seen], values[seen], seen[seen][None], scoring)
        for i, seen in enumerate(mask)
    ]
    return torch.cat(rows)


def _attend_masked(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scoring: Scoring
) -> Tensor:
    """Score every query and key; hidden ones get no weight."""
    queries_per_kv_head = query.shape[1] // keys.shape[1]
    keys = keys.double().repeat_interleave(queries_per_kv_head, dim=1)
    values = values.double().repeat_interleave(queries_per_kv_head, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if scoring.bias is not None:
        scores = scores + _bias_of(scoring.bias, *mask.shape)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
