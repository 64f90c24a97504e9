"""Attention steps of every kind, run through a backend over memory that holds NaN elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.attention.metadata import AttentionBackend, AttentionMetadata, LayerCall, Scoring
from prefix_cache import PagedMemory
from tests.support.paged_batch import (
    cross_metadata_for,
    layer_of,
    memory_that_holds,
    metadata_for,
    random_block_table,
    to_device,
)

NUM_LAYERS = 3


@dataclass(frozen=True)
class Bounds:
    """Limits on which tokens a token attends to: windows, chunks and images.

    Attributes:
        ahead: number of positions per image; an image's tokens attend to each other.
    """

    window: int | None = None
    ahead: int = 1

    def first_visible(self, position: int) -> int:
        """Search by trial, so that it shares nothing with the code under test."""
        return next(
            key
            for key in range(position + 1)
            if self.window is None or position - key < self.window
        )


@dataclass(frozen=True)
class Shape:
    """Lengths of a step's requests, decodes first, and the numbers of heads."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_size: int
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16

    def with_block_size(self, block_size: int) -> Shape:
        """Return the same requests with another block size."""
        return replace(self, block_size=block_size)


BOUNDS = {
    "all": Bounds(),
    "window of 1": Bounds(window=1),
    "window of 3": Bounds(window=3),
    "window of 16": Bounds(window=16),
    "window of 40": Bounds(window=40),
    "window longer than any sequence": Bounds(window=1000),
}

IMAGES = {
    "images of 7": Bounds(ahead=7),
    "images of 300": Bounds(ahead=300),
    "images of 7 in a window": Bounds(window=3, ahead=7),
}

SHAPES = {
    "prefill": Shape((5, 17), (5, 17), 4),
    "prefill of one token": Shape((1,), (1,), 4),
    "decodes": Shape((1, 1, 1), (9, 33, 2), 4),
    "decodes of very unequal length": Shape((1,) * 6, (3, 90, 95, 4, 40, 2), 16),
    "decodes of nearly equal length": Shape((1, 1, 1), (61, 50, 64), 4),
    "chunk after a cached prefix": Shape((6, 7), (6 + 16, 7 + 3), 4),
    "mixed": Shape((1, 1, 5, 8), (12, 40, 21, 8), 16),
    "block size 1": Shape((1, 3, 4), (7, 11, 4), 1),
    "one kv head": Shape((1, 4), (7, 10), 4, num_kv_heads=1),
    "no grouping": Shape((1, 4), (7, 10), 4, num_kv_heads=4),
    "prefix longer than a query tile": Shape((300,), (340,), 16),
    "long prefills beside short": Shape((1, 3, 260, 300), (50, 45, 560, 300), 16),
    "decode of one token": Shape((1, 1), (1, 1), 4),
    "few long decodes": Shape((1, 1), (700, 3), 16, 2, 1),
    "one long decode in blocks of 1": Shape((1,), (333,), 1, 2, 2),
    "head dim 64": Shape((1, 1, 3), (47, 16, 20), 16, 6, 2, 64),
    "head dim 128": Shape((1, 1, 3), (17, 64, 20), 4, 4, 1, 128),
    "head dim 80": Shape((1, 1), (17, 31), 4, 6, 3, 80),
    "head dim 20": Shape((1, 1), (17, 31), 16, 3, 3, 20),
    "head dim 7": Shape((1, 1), (17, 100), 4, 4, 2, 7),
}


def bounded_metadata(
    memory: PagedMemory, table: Tensor, shape: Shape, bounds: Bounds
) -> AttentionMetadata:
    """Return the metadata of a step of that shape."""
    metadata = metadata_for(memory, shape.query_lens, shape.seq_lens, table, window=bounds.window)
    if bounds.ahead == 1:
        return metadata
    ends = [
        min((position // bounds.ahead + 1) * bounds.ahead, seq_len)
        for query_len, seq_len in zip(shape.query_lens, shape.seq_lens, strict=True)
        for position in range(seq_len - query_len, seq_len)
    ]
    return replace(metadata, visible_ends=torch.tensor(ends, dtype=torch.int32))


def run_steps(
    backend: AttentionBackend,
    shape: Shape,
    bounds: Bounds = BOUNDS["all"],
    softcap: float | None = None,
    seed: int = 0,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    num_layers: int = NUM_LAYERS,
) -> tuple[Tensor, Tensor]:
    """Run two steps over one memory; nothing of the first may affect the second.

    All pages hold NaN except those that a query can see: blocks passed by a window, unowned
    blocks and the null page are NaN. Numbers are drawn on the CPU, whatever the device.
    """
    generator = torch.Generator().manual_seed(seed)
    # Scaled with the width as in models, so that scores, and thus rounding, do not grow with it;
    # but not by torch's default scale, which would hide a backend that ignores the setting.
    # Soft caps must bend scores noticeably.
    scale = (0.8 if softcap is None else 8.0) * shape.head_dim**-0.5
    scoring = Scoring(scale, softcap, bias)
    memory, num_blocks = memory_that_holds(shape.seq_lens, shape, num_layers, dtype, device)
    outputs = []
    for _ in range(2):
        table = random_block_table(shape.seq_lens, shape.block_size, num_blocks, generator)
        _fill_visible(memory, table, shape, bounds, generator, dtype)
        metadata = to_device(bounded_metadata(memory, table, shape, bounds), device)
        backend.begin_step(metadata)
        for index in range(num_layers):
            heads = shape.num_heads + 2 * shape.num_kv_heads
            qkv = torch.randn(metadata.num_tokens, heads, shape.head_dim, generator=generator)
            query, key, value = qkv.to(device, dtype).split(
                (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1
            )
            layer = layer_of(memory, index)
            outputs.append(backend.forward(LayerCall(query, key, value, layer, metadata, scoring)))
    return torch.cat(outputs), memory.buffer


def run_cross_step(
    backend: AttentionBackend,
    query_lens: tuple[int, ...],
    encoder_lens: tuple[int, ...],
    block_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Tensor:
    """Run non-causal attention over the outputs of all encoders of the step; the rest holds NaN.

    Exceptions are the null page and the rest of an input's last page: the engine clears both,
    and some backends read them.
    """
    generator = torch.Generator().manual_seed(0)
    shape = Shape(query_lens, encoder_lens, block_size, 8, 2, 64)
    memory, num_blocks = memory_that_holds(encoder_lens, shape, 1, dtype, device)
    memory.buffer.view(dtype).fill_(float("nan"))
    memory.clear_null_page()
    table = random_block_table(encoder_lens, block_size, num_blocks, generator)
    for row, encoder_len in zip(table.tolist(), encoder_lens, strict=True):
        if encoder_len % block_size:
            memory.clear_page(0, row[encoder_len // block_size])
    written = (True,) * len(encoder_lens)
    metadata = cross_metadata_for(memory, query_lens, encoder_lens, written, table)
    metadata = to_device(metadata, device)
    query = torch.randn(sum(query_lens), 8, 64, generator=generator).to(device, dtype)
    # Values below 1: the test compares sums, not the type's precision far from 0.
    rows = torch.randn(2, sum(encoder_lens), 2, 64, generator=generator) / 4
    key, value = rows.to(device, dtype)
    backend.begin_step(metadata)
    layer = layer_of(memory, 0)
    return backend.forward(LayerCall(query, key, value, layer, metadata, Scoring(0.125)))


def _fill_visible(
    memory: PagedMemory,
    table: Tensor,
    shape: Shape,
    bounds: Bounds,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> None:
    """Fill memory with NaN except visible blocks; drop every other passed block from the table."""
    numbers_of_page = memory.config.groups[0].page_bytes // dtype.itemsize
    pages = memory.buffer.view(dtype).view(-1, numbers_of_page)
    pages.fill_(float("nan"))
    for request, (query_len, seq_len) in enumerate(
        zip(shape.query_lens, shape.seq_lens, strict=True)
    ):
        first = bounds.first_visible(seq_len - query_len) // shape.block_size
        for block in table[request, first : -(-seq_len // shape.block_size)].tolist():
            numbers = torch.empty(pages.shape[1]).normal_(0.0, 3.0, generator=generator)
            pages[block] = numbers.to(pages.device, pages.dtype)
        table[request, :first:2] = 0
