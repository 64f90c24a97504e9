"""Attention with torch alone: gather the pages, then ``scaled_dot_product_attention``.

Decodes run as padded batches, one per bucket of similar visible length; each group of query heads
is folded into the query dimension, so that it shares one pass over its keys::

    query (B, Hkv, heads per Hkv, D)   keys, values (B, Hkv, T, D)   mask (B, 1, 1, T)

Prefills run one by one. Without cached tokens their keys are this step's own, and no page is
read; they run in one call if only causality limits what they see, else in tiles of queries.

A bias by distance is added to the masks, in the dtype of the queries. Requests with nothing to
attend to (cross-attention without an encoder's output) are in no bucket and no prefill.

A key that a query does not see never affects its output, not even if it is NaN. A weight of 0 does
not ensure this: 0 * NaN is NaN, and so is NaN plus the minus infinity of a mask. Query 2 must give
the same output in both cases::

    key            0  1  2  3 (NaN)              key            0  1  2  3
    query 2        x  x  x  .                    query 2        x  x  x  .
    query 3        x  x  x  x                    query 3        x  x  x  x

Non-finite numbers are rare and detectable: a finite output used none. So outputs are checked, at
the cost of a sum, and only a non-finite output is recomputed, without the non-finite keys, for the
queries that do not see them.

Tiles avoid a mask of all queries by all keys. A tile's keys begin with the first that its first
query sees and end with the key of its last query::

    keys         |<- before the tile ->|<- tile ->|
    first query  |  x  x  x  x  x  x   | x . . .  |
    last query   |  .  .  .  x  x  x   | x x x x  |      a window of 7

Without causality there is nothing to mask: a tile only bounds the number of scores in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.metadata import (
    AttentionBackend,
    AttentionMetadata,
    LayerCall,
    Scoring,
    bias_at,
    first_visible,
    layer_chunks,
    soft_capped_attention,
    tile_bias,
    visible_blocks,
    write_kv,
)
from engine.resources.device import are_finite, upload_tensor
from prefix_cache import LayerKVCache


def attend_to_seen(
    attend: Callable[[Tensor, Tensor], Tensor],
    keys: Tensor,
    values: Tensor,
    sees: Callable[[], Tensor],
) -> Tensor:
    """Return ``attend(keys, values)``, unaffected by non-finite keys that a query does not see.

    On CUDA, where the check would wait for the device in every layer, outputs are returned
    unchecked. There, non-finite numbers can only reach earlier tokens of their own sequence: the
    engine clears the rest of new pages, kernels read no others, and a request with a non-finite
    row fails, without publishing anything of that step.
    """
    output = attend(keys, values)
    if output.is_cuda or are_finite([output]):
        return output
    is_nonfinite = ~(keys.isfinite() & values.isfinite()).flatten(-2).all(-1)
    hidden = is_nonfinite[..., None, None]
    recomputed = attend(keys.masked_fill(hidden, 0.0), values.masked_fill(hidden, 0.0))
    is_touched = (sees() & is_nonfinite[..., None, :]).any(-1)
    return torch.where(is_touched[..., None, None], output, recomputed)


_TILE_QUERIES = 256


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Neighbouring queries of one request and the keys that any of them sees.

    Attributes:
        keys: rows of the request's keys; see :class:`Prefill`.
        spans: ``(2, queries)`` first and end of the keys that each query sees, relative to
            ``keys``; None if no query sees later keys than its own.
    """

    queries: slice
    keys: slice
    spans: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Prefill:
    """One request of several query tokens.

    Attributes:
        pages: its blocks from the first visible one on, whose tokens are its keys; None if nothing
            is cached, so that its keys are those of this step's tokens.
        is_causal: True if it can run at once without a mask: queries see all keys up to their own.
        is_masked: False if every query of a tile sees all keys of the tile.
        window: maximum number of positions a query sees, including itself; None: unlimited.
    """

    tokens: slice
    pages: Tensor | None
    tiles: tuple[QueryTile, ...]
    is_causal: bool
    is_masked: bool
    window: int | None = None


def lay_out_prefill(metadata: AttentionMetadata, request: int) -> Prefill:
    """Cut a request of the step into tiles; without causality, it must have keys to attend to."""
    start, end = metadata.query_start_loc[request : request + 2].tolist()
    seq_len, block_size = int(metadata.seq_lens[request]), metadata.block_size
    if not metadata.causal:
        # Every query sees every key; keys may be from earlier steps, so they are read from pages.
        bounds = pairwise(_tile_bounds(start, end))
        return Prefill(
            tokens=slice(start, end),
            pages=metadata.block_table[request, : -(-seq_len // block_size)],
            tiles=tuple(QueryTile(slice(a, b), slice(0, seq_len)) for a, b in bounds),
            is_causal=False,
            is_masked=False,
        )
    num_cached = seq_len - (end - start)
    positions = _tile_bounds(num_cached, seq_len)
    # The last bound is replaced by the last query: to run in one call, it must see position 0, too.
    queries = torch.tensor([*positions[:-1], seq_len - 1])
    *firsts, first_of_last = first_visible(queries, metadata.window).tolist()
    # Without cached tokens, the first query is at position 0, and this is 0.
    first_block = firsts[0] // block_size
    first_key = first_block * block_size
    tiles = tuple(
        _lay_out_tile(metadata, start - num_cached, first_key, a, b, first)
        for (a, b), first in zip(pairwise(positions), firsts, strict=True)
    )
    return Prefill(
        tokens=slice(start, end),
        pages=metadata.block_table[request, first_block : -(-seq_len // block_size)]
        if num_cached
        else None,
        tiles=tiles,
        is_causal=num_cached == 0
        and first_of_last == 0
        and all(tile.spans is None for tile in tiles),
        is_masked=True,
        window=metadata.window,
    )


def _lay_out_tile(
    metadata: AttentionMetadata, row_offset: int, first_key: int, start: int, end: int, first: int
) -> QueryTile:
    """Lay out the tile of positions ``start`` to ``end``, whose first visible key is ``first``.

    Args:
        row_offset: offset from a position to a token of the step.
        first_key: position of the request's first key.
    """
    queries, ends = slice(row_offset + start, row_offset + end), metadata.visible_ends
    last, spans = end, None
    if ends is not None:
        positions, seen = torch.arange(start, end), ends[queries]
        if not torch.equal(seen, positions + 1):
            last = int(seen.max())
            spans = torch.stack((first_visible(positions, metadata.window), seen)) - first
            spans = upload_tensor(spans, metadata.block_table.device)
    return QueryTile(queries, slice(first - first_key, last - first_key), spans)


def _tile_bounds(start: int, end: int) -> list[int]:
    """Return the start positions of the tiles, followed by ``end``."""
    return [*range(start, end, _TILE_QUERIES), end]


class TileMask:
    """Additive mask of a tile: 0 where a query sees a key, minus infinity elsewhere.

    In every tile, the last query sees the last key. Counted from there, visibility is the same in
    all tiles. So one mask is built and each tile gets a corner of it, unless some of its queries
    see later keys than their own. The corner of 2 queries and 3 keys, with a window of 2, is in
    brackets::

        key       -5  -4  -3  -2  -1
        query -3   .   x   x   .   .
        query -2   .   . [ x   x   . ]
        query -1   .   . [ .   x   x ]

    It is kept across steps, and rebuilt only for more keys than ever before or another window.

    Args:
        dtype: dtype of queries and keys, as torch's fused attention requires.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._window: int | None = None
        self._mask = torch.empty(0, 0, device=device, dtype=dtype)

    def corner(self, tile: QueryTile, window: int | None) -> Tensor:
        """Return the mask of a tile, ``(queries, keys)``; it must not be modified."""
        num_queries = tile.queries.stop - tile.queries.start
        num_keys = tile.keys.stop - tile.keys.start
        if tile.spans is not None:
            keys = torch.arange(num_keys, device=self._mask.device)
            first, end = tile.spans[:, :, None]
            mask = self._mask.new_zeros(num_queries, num_keys)
            return mask.masked_fill_((keys < first) | (keys >= end), float("-inf"))
        if self._window != window or self._mask.shape[1] < num_keys:
            self._window = window
            self._mask = self._build(max(num_keys * 5 // 4, _TILE_QUERIES), window)
        corner = self._mask[-num_queries:, -num_keys:]
        # CUDA kernels read masks in vectors, which must begin at aligned addresses.
        return corner.contiguous() if corner.is_cuda else corner

    def _build(self, num_keys: int, window: int | None) -> Tensor:
        device = self._mask.device
        queries = torch.arange(-_TILE_QUERIES, 0, device=device)[:, None]
        keys = torch.arange(-num_keys, 0, device=device)[None, :]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, device=device, dtype=self._mask.dtype)
        return mask.masked_fill_(hidden, float("-inf"))


# A bucket's shortest sequence fills at least this share of the padded length. Below it, padding
# costs more than the additional calls of smaller buckets.
_MIN_FILL = 0.75


def bucket_by_length(lengths: list[int]) -> list[list[int]]:
    """Group sequences of similar length into lists of indices, longest first, each ascending."""
    buckets: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if not buckets or lengths[index] < _MIN_FILL * longest:
            buckets.append([])
            longest = lengths[index]
        buckets[-1].append(index)
    return [sorted(bucket) for bucket in buckets]


def allocate_output(query: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Allocate the output of ``forward``, with zeros if some tokens may have nothing to see."""
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    return output if metadata.causal else output.zero_()


@dataclass(slots=True)
class _DecodeBucket:
    """Decodes that run as one batch.

    Attributes:
        members: ``(B,)`` request (and token) indices; None: all decodes, in order.
        pages: ``(B * blocks,)`` block ids from :func:`visible_blocks`.
        mask: ``(B, 1, 1, blocks * block_size)`` added to the scores: 0 or -inf.
        newest: ``(B,)`` on the CPU: index of the query token's own key among its gathered keys.
    """

    members: Tensor | None
    pages: Tensor
    mask: Tensor
    newest: Tensor

    def mask_with(self, bias: Tensor, num_kv_heads: int) -> Tensor:
        """Add the bias of each key: ``(B, num_kv_heads, heads per kv head, keys)``."""
        newest = upload_tensor(self.newest, bias.device)
        distances = newest[:, None] - torch.arange(self.mask.shape[-1], device=bias.device)
        by_head: Tensor = bias_at(bias, distances).unflatten(0, (num_kv_heads, -1))
        return by_head.permute(2, 0, 1, 3).to(self.mask.dtype) + self.mask


class TorchBackend(AttentionBackend):
    """Attention on any device that torch supports."""

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
        """Require a floating point dtype; any device and block size is supported."""
        if not dtype.is_floating_point:
            raise ValueError(f"attention needs a floating point dtype, got {dtype}")

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Group the decodes into buckets and lay out the prefills."""
        self._lay_out_prefills(metadata, metadata.num_decodes)
        seq_lens = metadata.seq_lens[: metadata.num_decodes]
        first = first_visible(seq_lens - 1, metadata.window)
        lengths = (seq_lens - first // metadata.block_size * metadata.block_size).tolist()
        self._buckets = [
            self._decode_bucket(members, first, metadata)
            for members in bucket_by_length(lengths)
            if lengths[members[0]]
        ]

    def _lay_out_prefills(self, metadata: AttentionMetadata, first: int) -> None:
        """Lay out the requests from ``first`` on, which run one by one."""
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
            index = upload_tensor(on_cpu, self._device)
            block_table = metadata.block_table.index_select(0, index)
        block_size = metadata.block_size
        pages = visible_blocks(block_table, first, seq_lens, block_size)
        positions = (first // block_size * block_size)[:, None]
        positions = positions + torch.arange(pages.shape[1] * block_size)
        hidden = (positions < first[:, None]) | (positions >= seq_lens[:, None])
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        mask.masked_fill_(upload_tensor(hidden, self._device), float("-inf"))
        newest = seq_lens - 1 - positions[:, 0]
        return _DecodeBucket(index, pages.flatten(), mask[:, None, None], newest)

    def forward(self, call: LayerCall) -> Tensor:
        """See :meth:`AttentionBackend.forward`."""
        query, key, value, kv_cache, metadata, scoring = call
        write_kv(key, value, kv_cache, metadata.row_mapping)
        output = allocate_output(query, metadata)
        decodes = slice(0, metadata.num_decodes)
        for bucket in self._buckets:
            if bucket.members is None:
                output[decodes] = self._decode(query[decodes], bucket, kv_cache, scoring)
            else:
                queries = query.index_select(0, bucket.members)
                attended = self._decode(queries, bucket, kv_cache, scoring)
                output.index_copy_(0, bucket.members, attended)
        self._attend_prefills(call, output)
        return output

    def _attend_prefills(self, call: LayerCall, output: Tensor) -> None:
        """Compute the prefills of :meth:`_lay_out_prefills` into their rows of ``output``."""
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
                gathered = self._gather(prefill.pages, kv_cache)
                keys, values = (each.to(query.dtype) for each in gathered)
            for tile in prefill.tiles:
                output[tile.queries] = _attend_tile(
                    query[tile.queries],
                    keys[tile.keys],
                    values[tile.keys],
                    self._build_mask(prefill, tile, scoring.bias),
                    scoring,
                )

    def _build_mask(self, prefill: Prefill, tile: QueryTile, bias: Tensor | None) -> Tensor | None:
        """Return ``([num_heads,] queries, keys)``, with heads if biased; None: no mask needed."""
        if not prefill.is_masked:
            return None
        mask = self._tile_mask.corner(tile, prefill.window)
        return mask if bias is None else mask + tile_bias(bias, *mask.shape).to(mask.dtype)

    def _decode(
        self, query: Tensor, bucket: _DecodeBucket, kv_cache: LayerKVCache, scoring: Scoring
    ) -> Tensor:
        """Attend with one token per request of the bucket, ``(B, num_heads, head_dim)``."""
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
        """Gather keys and values, ``(pages * block_size, num_kv_heads, head_dim)`` each.

        Valid until the next gather, which reuses the memory.
        """
        index = pages * kv_cache.chunks_per_page
        row_shape = kv_cache.keys.shape[1:]
        keys, values = (
            scratch.gather(chunks, index).view(-1, *row_shape)
            for scratch, chunks in zip(self._scratch, layer_chunks(kv_cache), strict=True)
        )
        return keys, values


class _Scratch:
    """Reusable output memory for gathers.

    Fresh memory of this size would come from the operating system every time, and touching it
    first costs several times the gather.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._memory = torch.empty(0, device=device, dtype=dtype)

    def gather(self, source: Tensor, index: Tensor) -> Tensor:
        """Return ``source.index_select(0, index)`` for a source ``(n, width)``."""
        needed = index.shape[0] * source.shape[1]
        if self._memory.numel() < needed:
            # A tensor created in inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                self._memory = torch.empty(
                    needed * 5 // 4, device=source.device, dtype=source.dtype
                )
        output = self._memory[:needed].view(index.shape[0], source.shape[1])
        return torch.index_select(source, 0, index, out=output)


def _attend_causally(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attend with a whole request causally, in packed layout."""

    def attend(keys: Tensor, values: Tensor) -> Tensor:
        return _sdpa(query, keys, values, scale, is_causal=True)

    def sees() -> Tensor:
        return torch.ones(len(query), len(query), dtype=torch.bool, device=query.device).tril_()

    return attend_to_seen(attend, keys, values, sees)


def _attend_tile(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scoring: Scoring
) -> Tensor:
    """Attend with a tile of one request, in packed layout ``(tokens, heads, head_dim)``."""

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
    # Biases are finite, so any head shows which keys are masked.
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
    """Attend within one sequence in packed layout ``(tokens, heads, head_dim)``, maybe grouped."""
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
