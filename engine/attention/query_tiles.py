"""Prefills cut into tiles of queries, so that no mask is ever all queries by all keys.

A tile's keys begin with the first that its first query sees and end with the key of its last
query. Tiles end where chunks of local attention do: inside of one, all queries see from the same
position on, so that causality and the window are all that is left to mask::

    keys         |<- before the tile ->|<- tile ->|
    first query  |  x  x  x  x  x  x   | x . . .  |
    last query   |  .  .  .  x  x  x   | x x x x  |      a window of 7

Without causality there is nothing to mask: a tile only bounds how many scores there are at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from engine.attention.metadata import AttentionMetadata
from engine.attention.visibility import chunk_bounds, first_visible

__all__ = ["Prefill", "QueryTile", "TileMask", "lay_out_prefill"]

_TILE_QUERIES = 256


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Neighbouring queries of one request and the keys that any of them sees.

    Attributes:
        queries: their rows in the step.
        keys: rows of the request's keys; see :class:`Prefill`.
    """

    queries: slice
    keys: slice


@dataclass(frozen=True, slots=True)
class Prefill:
    """One request of several query tokens.

    Attributes:
        tokens: its rows in the step.
        pages: its blocks from the first that it can see on, whose tokens are its keys; None when
            nothing is cached, and its keys are those of its own tokens.
        tiles: all its queries, in order.
        is_causal: it can run as one, without a mask: every query sees all keys up to its own.
        is_masked: False where every query of a tile sees all keys of it.
        window: how many positions a query sees at most, itself included; None: all before it.
    """

    tokens: slice
    pages: Tensor | None
    tiles: tuple[QueryTile, ...]
    is_causal: bool
    is_masked: bool
    window: int | None = None


def lay_out_prefill(metadata: AttentionMetadata, request: int) -> Prefill:
    """Cut a request of the step into tiles; without causality, one that has something to see."""
    if not metadata.causal:
        return _lay_out_rectangle(metadata, request)
    start, end = metadata.query_start_loc[request : request + 2].tolist()
    seq_len, block_size = int(metadata.seq_lens[request]), metadata.block_size
    num_cached = seq_len - (end - start)
    bounds = _tile_bounds(num_cached, seq_len, metadata.chunk_size)
    # The last bound stands for the last query: to run as one, it too must see position 0.
    queries = torch.tensor([*bounds[:-1], seq_len - 1])
    *firsts, first_of_last = first_visible(queries, metadata.window, metadata.chunk_size).tolist()
    # A first query at position 0 sees from 0 on: without cached tokens this is 0.
    first_block = firsts[0] // block_size
    first_key = first_block * block_size
    to_row = start - num_cached
    return Prefill(
        tokens=slice(start, end),
        pages=metadata.block_table[request, first_block : -(-seq_len // block_size)]
        if num_cached
        else None,
        tiles=tuple(
            QueryTile(slice(to_row + a, to_row + b), slice(first - first_key, b - first_key))
            for (a, b), first in zip(pairwise(bounds), firsts, strict=True)
        ),
        is_causal=num_cached == 0 and first_of_last == 0,
        is_masked=True,
        window=metadata.window,
    )


def _lay_out_rectangle(metadata: AttentionMetadata, request: int) -> Prefill:
    """Every query sees every key; keys may be of earlier steps, so they are read from pages."""
    start, end = metadata.query_start_loc[request : request + 2].tolist()
    seq_len = int(metadata.seq_lens[request])
    bounds = _tile_bounds(start, end, None)
    return Prefill(
        tokens=slice(start, end),
        pages=metadata.block_table[request, : -(-seq_len // metadata.block_size)],
        tiles=tuple(QueryTile(slice(a, b), slice(0, seq_len)) for a, b in pairwise(bounds)),
        is_causal=False,
        is_masked=False,
    )


def _tile_bounds(start: int, end: int, chunk_size: int | None) -> list[int]:
    """Positions where tiles begin, and ``end``."""
    chunks = pairwise(chunk_bounds(start, end, chunk_size))
    return [*(bound for a, b in chunks for bound in range(a, b, _TILE_QUERIES)), end]


class TileMask:
    """What is added to a tile's scores: 0 where a query sees a key, minus infinity elsewhere.

    The last query sees the last key, whatever the tile. Counted from there, who sees whom is the
    same in all tiles, so that one mask is made and every tile gets a corner of it. In brackets
    that of 2 queries and 3 keys, with a window of 2::

        key       -5  -4  -3  -2  -1
        query -3   .   x   x   .   .
        query -2   .   . [ x   x   . ]
        query -1   .   . [ .   x   x ]

    It is kept from step to step, and made anew only for more keys than ever before.

    Args:
        device: where scores are.
        dtype: of queries and keys, as torch's fused attention wants.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._window: int | None = None
        self._mask = torch.empty(0, 0, device=device, dtype=dtype)

    def corner(self, tile: QueryTile, window: int | None) -> Tensor:
        """The mask of a tile, ``(queries, keys)``; it must not be written to."""
        num_queries = tile.queries.stop - tile.queries.start
        num_keys = tile.keys.stop - tile.keys.start
        if self._window != window or self._mask.shape[1] < num_keys:
            self._window = window
            self._mask = self._make(max(num_keys * 5 // 4, _TILE_QUERIES), window)
        corner = self._mask[-num_queries:, -num_keys:]
        # CUDA kernels read masks in vectors, which must begin at aligned addresses.
        return corner.contiguous() if corner.is_cuda else corner

    def _make(self, num_keys: int, window: int | None) -> Tensor:
        device = self._mask.device
        queries = torch.arange(-_TILE_QUERIES, 0, device=device)[:, None]
        keys = torch.arange(-num_keys, 0, device=device)[None, :]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, device=device, dtype=self._mask.dtype)
        return mask.masked_fill_(hidden, float("-inf"))
