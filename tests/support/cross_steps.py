"""Cross-attention steps, run through a backend, and what they must give, found key by key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.metadata import AttentionBackend, LayerCall, Scoring
from prefix_cache import LayerKVCache
from tests.support.paged_batch import (
    cross_metadata_for,
    layer_of,
    memory_that_holds,
    random_block_table,
)

__all__ = ["CrossShape", "assert_steps_equal_brute_force"]

_NUM_LAYERS = 2


@dataclass(frozen=True)
class CrossShape:
    """A step's requests, decodes first, and the heads.

    ``is_written`` tells whose encoder runs in the first step; the other requests' keys are in the
    pages before it. In a second step all only read.
    """

    query_lens: tuple[int, ...]
    encoder_lens: tuple[int, ...]
    is_written: tuple[bool, ...]
    block_size: int
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16


def assert_steps_equal_brute_force(
    backend: AttentionBackend,
    shape: CrossShape,
    *,
    softcap: float | None = None,
    null_page: float = float("nan"),
) -> None:
    """Outputs as :func:`_brute_force`, keys and values where the table says, all else untouched.

    Pages that no request owns hold NaN, and so does the null page unless told otherwise.
    """
    generator = torch.Generator().manual_seed(0)
    memory, num_blocks = memory_that_holds(shape.encoder_lens, shape, _NUM_LAYERS)
    table = random_block_table(shape.encoder_lens, shape.block_size, num_blocks, generator)
    pages = memory.buffer.view(torch.float32).view(num_blocks, -1)
    pages.fill_(float("nan"))
    owned = table[table > 0].long()
    pages[owned] = torch.randn(len(owned), pages.shape[1], generator=generator)
    pages[0] = null_page

    encoded = []  # per layer and request: keys and values
    for index in range(_NUM_LAYERS):
        rows = [
            torch.randn(length, 2 * shape.num_kv_heads, shape.head_dim, generator=generator)
            for length in shape.encoder_lens
        ]
        encoded.append([row.chunk(2, dim=1) for row in rows])
        for request, (keys, values) in enumerate(encoded[index]):
            if not shape.is_written[request]:
                _store(layer_of(memory, index), table[request], keys, values)
    expected_memory = memory.buffer.clone()

    none_written = (False,) * len(shape.query_lens)
    for is_written in (shape.is_written, none_written):
        metadata = cross_metadata_for(
            memory, shape.query_lens, shape.encoder_lens, is_written, table
        )
        backend.begin_step(metadata)
        for index in range(_NUM_LAYERS):
            layer = layer_of(memory, index)
            query = torch.randn(
                sum(shape.query_lens), shape.num_heads, shape.head_dim, generator=generator
            )
            written = [pair for pair, w in zip(encoded[index], is_written, strict=True) if w]
            nothing = torch.empty(0, shape.num_kv_heads, shape.head_dim)
            key, value = (
                torch.cat([nothing, *(pair[part] for pair in written)]) for part in (0, 1)
            )
            output = backend.forward(
                LayerCall(query, key, value, layer, metadata, Scoring(0.3, softcap))
            )
            expected = _brute_force(query, encoded[index], shape.query_lens, 0.3, softcap)
            torch.testing.assert_close(output.double(), expected, atol=2e-6, rtol=2e-5)
    after = memory.buffer.clone()
    memory.buffer.copy_(expected_memory)
    for index in range(_NUM_LAYERS):
        for request, (keys, values) in enumerate(encoded[index]):
            _store(layer_of(memory, index), table[request], keys, values)
    assert torch.equal(after, memory.buffer)


def _store(layer: LayerKVCache, block_ids: Tensor, keys: Tensor, values: Tensor) -> None:
    block_size = layer.chunks.shape[1]
    for position, (key, value) in enumerate(zip(keys, values, strict=True)):
        chunk = int(block_ids[position // block_size]) * layer.chunks_per_page
        chunk += 2 * layer.layer_index
        layer.chunks[chunk, position % block_size] = key
        layer.chunks[chunk + 1, position % block_size] = value


def _brute_force(
    query: Tensor,
    encoded: list[tuple[Tensor, ...]],
    query_lens: tuple[int, ...],
    scale: float,
    softcap: float | None,
) -> Tensor:
    """One token and one head at a time, in float64; zeros for who has nothing to see."""
    owners = [request for request, length in enumerate(query_lens) for _ in range(length)]
    output = torch.zeros(query.shape, dtype=torch.float64)
    for token, request in enumerate(owners):
        keys, values = (part.double() for part in encoded[request])
        for head in range(query.shape[1] if len(keys) else 0):
            kv_head = head * keys.shape[1] // query.shape[1]
            scores = keys[:, kv_head] @ query[token, head].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            output[token, head] = scores.softmax(0) @ values[:, kv_head]
    return output
