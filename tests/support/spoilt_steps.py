"""Attention steps in which some keys and values are NaN or infinite, as all unused memory is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.metadata import AttentionBackend, LayerCall, Scoring
from prefix_cache import LayerKVCache
from tests.support.attention_steps import Bounds, Shape, bounded_metadata
from tests.support.paged_batch import layer_of, memory_that_holds, random_block_table

__all__ = ["Spoilt", "run_spoilt_step", "sees"]

_NUM_LAYERS = 2


@dataclass(frozen=True)
class Spoilt:
    """One position of one request whose key, or value, or both, hold a number that is none."""

    request: int
    position: int
    parts: tuple[str, ...] = ("key", "value")
    number: float = float("nan")


def run_spoilt_step(
    backend: AttentionBackend,
    shape: Shape,
    bounds: Bounds,
    scoring: Scoring,
    spoilt: Spoilt | None,
    unused: float = float("nan"),
) -> Tensor:
    """One layer of a step; the same numbers in every call, but for what is spoilt."""
    generator = torch.Generator().manual_seed(0)
    memory, num_blocks = memory_that_holds(shape.seq_lens, shape, _NUM_LAYERS)
    memory.buffer.view(torch.float32).fill_(unused)
    table = random_block_table(shape.seq_lens, shape.block_size, num_blocks, generator)
    layer = layer_of(memory, 1)
    queries: list[Tensor] = []
    parts: dict[str, list[Tensor]] = {"key": [], "value": []}
    for request, (query_len, seq_len) in enumerate(
        zip(shape.query_lens, shape.seq_lens, strict=True)
    ):
        queries.append(torch.randn(query_len, shape.num_heads, shape.head_dim, generator=generator))
        rows = torch.randn(2, seq_len, shape.num_kv_heads, shape.head_dim, generator=generator)
        both = dict(zip(("key", "value"), rows, strict=True))
        if spoilt is not None and spoilt.request == request:
            for part in spoilt.parts:
                both[part][spoilt.position] = spoilt.number
        first = bounds.first_visible(seq_len - query_len)
        for position in range(first, seq_len - query_len):
            block = int(table[request, position // shape.block_size])
            _store(layer, block, position % shape.block_size, both, position)
        for part, found in both.items():
            parts[part].append(found[seq_len - query_len :])
    metadata = bounded_metadata(memory, table, shape, bounds)
    backend.begin_step(metadata)
    query, key, value = (torch.cat(each) for each in (queries, parts["key"], parts["value"]))
    return backend.forward(LayerCall(query, key, value, layer, metadata, scoring))


def sees(shape: Shape, bounds: Bounds, spoilt: Spoilt) -> Tensor:
    """``(num_tokens,)`` booleans: the queries that see the spoilt position."""
    found = [
        request == spoilt.request and bounds.first_visible(position) <= spoilt.position <= position
        for request, (query_len, seq_len) in enumerate(
            zip(shape.query_lens, shape.seq_lens, strict=True)
        )
        for position in range(seq_len - query_len, seq_len)
    ]
    return torch.tensor(found)


def _store(
    layer: LayerKVCache, block: int, offset: int, both: dict[str, Tensor], position: int
) -> None:
    chunk = block * layer.chunks_per_page + 2 * layer.layer_index
    layer.chunks[chunk, offset] = both["key"][position]
    layer.chunks[chunk + 1, offset] = both["value"][position]
