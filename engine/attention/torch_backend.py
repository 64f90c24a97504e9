"""Attention with torch alone: gather the pages, then ``scaled_dot_product_attention``.

Decodes run as padded batches, one per bucket of similar visible length; each group of query heads
is folded into the query dimension, where it shares the one pass over its keys::

    query (B, Hkv, heads per Hkv, D)   keys, values (B, Hkv, T, D)   mask (B, 1, 1, T)

Prefills run one by one. Without cached tokens their keys are this step's own, and no page is
read; they run as one where causality is all that limits what they see. All others go in tiles of
queries; see :mod:`engine.attention.query_tiles`.

A bias by distance is added to the masks, in the type of the queries. Requests that have nothing to
see (cross-attention without an encoder's output) are in no bucket and no prefill. What a mask hides
is hidden also where it is not finite; see :mod:`engine.attention.seen_values`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.backend import AttentionBackend, LayerCall
from engine.attention.metadata import AttentionMetadata
from engine.attention.paged_rows import layer_chunks, visible_blocks, write_kv
from engine.attention.query_tiles import Prefill, QueryTile, TileMask, lay_out_prefill
from engine.attention.scoring import Scoring, bias_at, bias_of_tile, soft_capped_attention
from engine.attention.seen_values import attend_to_seen
from engine.attention.visibility import first_visible
from prefix_cache import LayerKVCache

__all__ = ["TorchBackend", "bucket_by_length", "new_output"]

# A bucket's shortest sequence fills at least this share of the padded length. Below it, padding
# costs more than the further calls that smaller buckets need.
_MIN_FILL = 0.75


def bucket_by_length(lengths: list[int]) -> list[list[int]]:
    """Part sequences into buckets whose members are of similar length.

    Returns:
        Indices into ``lengths``, longest bucket first; ascending inside a bucket.
    """
    buckets: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if not buckets or lengths[index] < _MIN_FILL * longest:
            buckets.append([])
            longest = lengths[index]
        buckets[-1].append(index)
    return [sorted(bucket) for bucket in buckets]


def new_output(query: Tensor, metadata: AttentionMetadata) -> Tensor:
    """What ``forward`` is to write to: zeros where some tokens may have nothing to see."""
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    return output if metadata.causal else output.zero_()


@dataclass(slots=True)
class _DecodeBucket:
    """Decodes that run as one batch.

    Attributes:
        members: ``(B,)`` their request (and token) indices; None: all decodes, in order.
        pages: ``(B * blocks,)`` block ids that :func:`visible_blocks` gave.
        mask: ``(B, 1, 1, blocks * block_size)`` added to the scores: 0 or -inf.
        newest: ``(B,)`` on the CPU: which of its gathered keys is the query token's own.
    """

    members: Tensor | None
    pages: Tensor
    mask: Tensor
    newest: Tensor

    def mask_with(self, bias: Tensor, num_kv_heads: int) -> Tensor:
        """``(B, num_kv_heads, heads per kv head, keys)``: the mask and the bias of each key."""
        newest = self.newest.to(bias.device)
        distances = newest[:, None] - torch.arange(self.mask.shape[-1], device=bias.device)
        by_head: Tensor = bias_at(bias, distances).unflatten(0, (num_kv_heads, -1))
        return by_head.permute(2, 0, 1, 3).to(self.mask.dtype) + self.mask


class TorchBackend(AttentionBackend):
    """Attention on any device that torch has.

    Args:
        device: where queries and pages live.
        dtype: their type.
    """

    name: ClassVar[str] = "torch"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._buckets: list[_DecodeBucket] = []
        self._prefills: list[Prefill] = []
        self._tile_mask = TileMask(device, dtype)
        self._scratch = (_Scratch(device, dtype), _Scratch(device, dtype))

    @classmethod
    def check_support(cls, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
        """Any device, any block size; floating point only."""
        if not dtype.is_floating_point:
            raise ValueError(f"attention needs a floating point dtype, got {dtype}")

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Prepare the decodes and lay out the prefills."""
        self._lay_out_decodes(metadata)
        self._lay_out_prefills(metadata, metadata.num_decodes)

    def _lay_out_decodes(self, metadata: AttentionMetadata) -> None:
        """Part the decodes into buckets by how much they read."""
        seq_lens = metadata.seq_lens[: metadata.num_decodes]
        first = first_visible(seq_lens - 1, metadata.window, metadata.chunk_size)
        lengths = (seq_lens - first // metadata.block_size * metadata.block_size).tolist()
        self._buckets = [
            self._decode_bucket(members, first, metadata)
            for members in bucket_by_length(lengths)
            if lengths[members[0]]
        ]

    def _lay_out_prefills(self, metadata: AttentionMetadata, first: int) -> None:
        """Prepare the requests from ``first`` on to run one by one."""
        self._prefills = [
            lay_out_prefill(metadata, request)
            for request, seq_len in enumerate(metadata.seq_lens.tolist())
            if request >= first and seq_len
        ]

    def _decode_bucket(
        self, members: list[int], first: Tensor, metadata: AttentionMetadata
    ) -> _DecodeBucket:
        index: Tensor | None = None
        block_table = metadata.block_table[: len(members)]
        seq_lens = metadata.seq_lens[: len(members)]
        if len(members) < metadata.num_decodes:
            on_cpu = torch.tensor(members)
            first, seq_lens = first[on_cpu], metadata.seq_lens[on_cpu]
            index = on_cpu.to(self._device)
            block_table = metadata.block_table.index_select(0, index)
        block_size = metadata.block_size
        pages = visible_blocks(block_table, first, seq_lens, block_size)
        positions = (first // block_size * block_size)[:, None]
        positions = positions + torch.arange(pages.shape[1] * block_size)
        hidden = (positions < first[:, None]) | (positions >= seq_lens[:, None])
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))
        newest = seq_lens - 1 - positions[:, 0]
        return _DecodeBucket(index, pages.flatten(), mask[:, None, None].to(self._device), newest)

    def forward(self, call: LayerCall) -> Tensor:
        """See :meth:`AttentionBackend.forward`."""
        query, key, value, kv_cache, metadata, scoring = call
        write_kv(key, value, kv_cache, metadata.row_mapping)
        output = new_output(query, metadata)
        if metadata.num_decodes:
            decodes = slice(0, metadata.num_decodes)
            self._attend_decodes(query[decodes], kv_cache, scoring, output[decodes])
        self._attend_prefills(call, output)
        return output

    def _attend_prefills(self, call: LayerCall, output: Tensor) -> None:
        """Write what :meth:`_lay_out_prefills` prepared to its rows of ``output``."""
        query, key, value, kv_cache, _, scoring = call
        for prefill in self._prefills:
            tokens = prefill.tokens
            if prefill.is_causal and scoring.only_scales:
                output[tokens] = _attend_causally(
                    query[tokens], key[tokens], value[tokens], scoring.scale
                )
                continue
            if prefill.pages is None:
                keys, values = key[tokens], value[tokens]
            else:
                keys, values = self._gather(prefill.pages, kv_cache)
            for tile in prefill.tiles:
                output[tile.queries] = _attend_tile(
                    query[tile.queries],
                    keys[tile.keys],
                    values[tile.keys],
                    self._mask_of(prefill, tile, scoring.bias),
                    scoring,
                )

    def _mask_of(self, prefill: Prefill, tile: QueryTile, bias: Tensor | None) -> Tensor | None:
        """``(queries, keys)``, or ``(num_heads, queries, keys)`` with a bias; None: all is seen."""
        if not prefill.is_masked:
            return None
        mask = self._tile_mask.corner(tile, prefill.window)
        return mask if bias is None else mask + bias_of_tile(bias, *mask.shape).to(mask.dtype)

    def _attend_decodes(
        self, query: Tensor, kv_cache: LayerKVCache, scoring: Scoring, output: Tensor
    ) -> None:
        """Attend with one token of each decode, ``(num_decodes, num_heads, head_dim)``."""
        for bucket in self._buckets:
            if bucket.members is None:
                output.copy_(self._decode(query, bucket, kv_cache, scoring))
            else:
                some = query.index_select(0, bucket.members)
                attended = self._decode(some, bucket, kv_cache, scoring)
                output.index_copy_(0, bucket.members, attended)

    def _decode(
        self, query: Tensor, bucket: _DecodeBucket, kv_cache: LayerKVCache, scoring: Scoring
    ) -> Tensor:
        """One token each of the bucket's requests, ``(B, num_heads, head_dim)``."""
        batch, num_heads, head_dim = query.shape
        num_kv_heads = kv_cache.keys.shape[1]
        keys, values = (
            rows.view(batch, -1, num_kv_heads, head_dim)
            for rows in self._gather(bucket.pages, kv_cache)
        )
        mask = bucket.mask
        if scoring.bias is not None:
            mask = bucket.mask_with(scoring.bias, num_kv_heads)

        def attend(keys: Tensor, values: Tensor) -> Tensor:
            if scoring.softcap is not None:
                capped, each_query = scoring.softcap, mask[:, :, :, None]
                return soft_capped_attention(
                    query[:, None], keys, values, each_query, scoring.scale, capped
                )
            folded = query.reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
            attended = F.scaled_dot_product_attention(
                folded,
                keys.transpose(1, 2),
                values.transpose(1, 2),
                attn_mask=mask,
                scale=scoring.scale,
            )
            return attended.reshape(batch, 1, num_heads, head_dim)

        return attend_to_seen(attend, keys, values, lambda: bucket.mask[:, 0] == 0)[:, 0]

    def _gather(self, pages: Tensor, kv_cache: LayerKVCache) -> tuple[Tensor, Tensor]:
        """Keys and values of pages, ``(pages * block_size, num_kv_heads, head_dim)`` each.

        Valid until the next gather: both lie in memory that is used again.
        """
        index = pages * kv_cache.chunks_per_page
        row_shape = kv_cache.keys.shape[1:]
        keys, values = (
            scratch.gather(chunks, index).view(-1, *row_shape)
            for scratch, chunks in zip(self._scratch, layer_chunks(kv_cache), strict=True)
        )
        return keys, values


class _Scratch:
    """Memory that gathers are written to.

    It is kept, because fresh memory of this size is fetched from the operating system every
    time, and touching it first costs several times the gather.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._memory = torch.empty(0, device=device, dtype=dtype)

    def gather(self, source: Tensor, index: Tensor) -> Tensor:
        """``source.index_select(0, index)`` for a source ``(n, width)``."""
        needed = index.shape[0] * source.shape[1]
        if self._memory.numel() < needed:
            # A tensor made in inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                self._memory = torch.empty(
                    needed * 5 // 4, device=source.device, dtype=source.dtype
                )
        output = self._memory[:needed].view(index.shape[0], source.shape[1])
        return torch.index_select(source, 0, index, out=output)


def _attend_causally(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """A whole request, every query of which sees the keys up to its own; in packed layout."""

    def attend(keys: Tensor, values: Tensor) -> Tensor:
        return _sdpa(query, keys, values, scale, is_causal=True)

    def sees() -> Tensor:
        return torch.ones(len(query), len(query), dtype=torch.bool, device=query.device).tril_()

    return attend_to_seen(attend, keys, values, sees)


def _attend_tile(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scoring: Scoring
) -> Tensor:
    """Neighbouring queries of one request, in packed layout ``(tokens, heads, head_dim)``."""

    def attend(keys: Tensor, values: Tensor) -> Tensor:
        if scoring.softcap is None:
            return _sdpa(query, keys, values, scoring.scale, mask=mask)
        by_head = mask
        if mask is not None and mask.ndim == 3:
            by_head = mask.unflatten(0, (keys.shape[1], -1))
        return soft_capped_attention(
            query[None], keys[None], values[None], by_head, scoring.scale, scoring.softcap
        )[0]

    if mask is None:
        return attend(keys, values)
    # A bias hides nothing: what is hidden is so for every head.
    first_head = mask[0] if mask.ndim == 3 else mask
    return attend_to_seen(attend, keys, values, lambda: first_head > float("-inf"))


def _sdpa(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """One sequence in packed layout ``(tokens, heads, head_dim)``, grouped heads allowed."""
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return attended[0].transpose(0, 1)
