"""Attention with torch alone: gather the pages, then ``scaled_dot_product_attention``.

Decodes run as padded batches, one per bucket of similar length; each group of query heads is
folded into the query dimension, where it shares the one pass over its keys::

    query (B, Hkv, heads per Hkv, D)   keys, values (B, Hkv, T, D)   mask (B, 1, 1, T)

Prefills run one by one. Without cached tokens their keys are this step's own, and no page is
read; with cached tokens the queries go in tiles, so that a long prefix never needs a mask of
all queries by all keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.backend import AttentionBackend, AttentionMetadata
from engine.attention.paged_rows import layer_chunks, write_kv
from prefix_cache import LayerKVCache

__all__ = ["TorchBackend", "bucket_by_length"]

# A bucket's shortest sequence fills at least this share of the padded length. Below it, padding
# costs more than the further calls that smaller buckets need.
_MIN_FILL = 0.75
_QUERY_TILE = 256


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


@dataclass(slots=True)
class _DecodeBucket:
    """Decodes that run as one batch.

    Attributes:
        members: ``(B,)`` their request (and token) indices; None when they are all decodes of
            the step in order, which then need no gather.
        pages: ``(B * blocks,)`` block ids, padded with the null block.
        mask: ``(B, 1, 1, blocks * block_size)`` added to the scores: 0 or -inf.
    """

    members: Tensor | None
    pages: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One request of several query tokens: its tokens ``start:end`` and its blocks."""

    start: int
    end: int
    seq_len: int
    pages: Tensor

    @property
    def num_cached(self) -> int:
        return self.seq_len - (self.end - self.start)


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
        self._prefills: list[_Prefill] = []
        self._scratch = (_Scratch(device, dtype), _Scratch(device, dtype))

    @classmethod
    def check_support(cls, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
        """Any device, any block size; floating point only."""
        if not dtype.is_floating_point:
            raise ValueError(f"attention needs a floating point dtype, got {dtype}")

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Prepare the decodes and lay out the prefills."""
        self._begin_decodes(metadata)
        lengths = metadata.seq_lens.tolist()
        starts = metadata.query_start_loc.tolist()
        self._prefills = []
        for request in range(metadata.num_decodes, metadata.num_reqs):
            num_blocks = -(-lengths[request] // metadata.block_size)
            pages = metadata.block_table[request, :num_blocks]
            self._prefills.append(
                _Prefill(starts[request], starts[request + 1], lengths[request], pages)
            )

    def _begin_decodes(self, metadata: AttentionMetadata) -> None:
        lengths = metadata.seq_lens[: metadata.num_decodes].tolist()
        self._buckets = [
            self._decode_bucket(members, lengths, metadata) for members in bucket_by_length(lengths)
        ]

    def _decode_bucket(
        self, members: list[int], lengths: list[int], metadata: AttentionMetadata
    ) -> _DecodeBucket:
        longest = max(lengths[member] for member in members)
        num_blocks = -(-longest // metadata.block_size)
        index: Tensor | None = None
        block_table = metadata.block_table[: len(members)]
        seq_lens = metadata.seq_lens[: len(members)]
        if len(members) < metadata.num_decodes:
            on_cpu = torch.tensor(members)
            seq_lens = metadata.seq_lens[on_cpu]
            index = on_cpu.to(self._device)
            block_table = metadata.block_table.index_select(0, index)
        hidden = torch.arange(num_blocks * metadata.block_size) >= seq_lens[:, None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))
        pages = block_table[:, :num_blocks].flatten()
        return _DecodeBucket(index, pages, mask[:, None, None].to(self._device))

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
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if metadata.num_decodes:
            decodes = slice(0, metadata.num_decodes)
            self._attend_decodes(query[decodes], kv_cache, metadata, scale, output[decodes])
        for prefill in self._prefills:
            tokens = slice(prefill.start, prefill.end)
            if prefill.num_cached:
                keys, values = self._gather(prefill.pages, kv_cache)
                _prefill_after_prefix(
                    query[tokens], keys, values, prefill.num_cached, scale, output[tokens]
                )
            else:
                output[tokens] = _sdpa(
                    query[tokens], key[tokens], value[tokens], scale, is_causal=True
                )
        return output

    def _attend_decodes(
        self,
        query: Tensor,
        kv_cache: LayerKVCache,
        metadata: AttentionMetadata,
        scale: float,
        output: Tensor,
    ) -> None:
        """Attend with one token of each decode, ``(num_decodes, num_heads, head_dim)``.

        Keys and values are written already. The result goes to ``output``, which has query's
        shape.
        """
        for bucket in self._buckets:
            if bucket.members is None:
                output.copy_(self._decode(query, bucket, kv_cache, scale))
            else:
                some = query.index_select(0, bucket.members)
                attended = self._decode(some, bucket, kv_cache, scale)
                output.index_copy_(0, bucket.members, attended)

    def _decode(
        self, query: Tensor, bucket: _DecodeBucket, kv_cache: LayerKVCache, scale: float
    ) -> Tensor:
        """One token each of the bucket's requests, ``(B, num_heads, head_dim)``."""
        batch, num_heads, head_dim = query.shape
        num_kv_heads = kv_cache.keys.shape[1]
        keys, values = (
            rows.view(batch, -1, num_kv_heads, head_dim).transpose(1, 2)
            for rows in self._gather(bucket.pages, kv_cache)
        )
        folded = query.reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
        attended = F.scaled_dot_product_attention(
            folded, keys, values, attn_mask=bucket.mask, scale=scale
        )
        return attended.reshape(batch, num_heads, head_dim)

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


def _prefill_after_prefix(
    query: Tensor, keys: Tensor, values: Tensor, num_cached: int, scale: float, output: Tensor
) -> None:
    """Write attention of a sequence's last tokens to ``output``, tile by tile.

    Tile ``[a, b)`` sees ``num_cached + b`` keys; inside it the diagonal is masked::

        keys     |<- num_cached + a ->|<- b - a ->|
        query a  |  all               | x . . .   |
        query b-1|  all               | x x x x   |
    """
    for first in range(0, query.shape[0], _QUERY_TILE):
        tile = query[first : first + _QUERY_TILE]
        size = tile.shape[0]
        visible = num_cached + first + size
        mask = torch.full((size, visible), float("-inf"), dtype=query.dtype, device=query.device)
        mask.triu_(num_cached + first + 1)
        output[first : first + size] = _sdpa(
            tile, keys[:visible], values[:visible], scale, mask=mask
        )


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
