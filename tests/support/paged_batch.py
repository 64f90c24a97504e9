"""Random packed batches over paged memory, for tests of attention and of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from engine.attention.metadata import AttentionMetadata
from prefix_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroup, LayerKVCache, PagedMemory


def paged_memory(
    *,
    num_blocks: int,
    block_size: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> PagedMemory:
    """Return memory of one full-attention group."""
    spec = FullAttentionSpec(block_size, num_kv_heads, head_dim, dtype)
    names = tuple(f"layers.{index}" for index in range(num_layers))
    return PagedMemory(KVCacheConfig(num_blocks, (KVCacheGroup(names, spec),)), device)


class _Heads(Protocol):
    @property
    def block_size(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def memory_that_holds(
    lengths: Sequence[int],
    shape: _Heads,
    num_layers: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[PagedMemory, int]:
    """Return memory of blocks for the sequences, the null block and one spare; and their number."""
    num_blocks = 2 + sum(-(-length // shape.block_size) for length in lengths)
    memory = paged_memory(
        num_blocks=num_blocks,
        block_size=shape.block_size,
        num_layers=num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        device=device,
    )
    return memory, num_blocks


def with_garbage(memory: PagedMemory, generator: torch.Generator) -> PagedMemory:
    """Fill all pages, including the null block, with conspicuous numbers."""
    memory.buffer.view(torch.float32).normal_(0.0, 3.0, generator=generator)
    return memory


def random_block_table(
    num_tokens: Sequence[int], block_size: int, num_blocks: int, generator: torch.Generator
) -> Tensor:
    """Return a table with scattered, unshared blocks per request; 0 where none is needed."""
    free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    needed = [-(-count // block_size) for count in num_tokens]
    table = torch.zeros(len(needed), max(needed), dtype=torch.int32)
    for request, count in enumerate(needed):
        blocks = [free.pop() for _ in range(count)]
        table[request, :count] = torch.tensor(blocks, dtype=torch.int32)
    return table


def metadata_for(
    memory: PagedMemory,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_table: Tensor,
    *,
    group_id: int = 0,
    window: int | None = None,
) -> AttentionMetadata:
    """Return the metadata of a step; decodes (``query_len == 1``) must come first."""
    num_decodes = sum(length == 1 for length in query_lens)
    assert all(length == 1 for length in query_lens[:num_decodes]), "decodes come first"
    block_size = memory.config.groups[group_id].spec.block_size
    slots = [
        int(block_table[request, position // block_size]) * block_size + position % block_size
        for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True))
        for position in range(seq_len - query_len, seq_len)
    ]
    slot_mapping = torch.tensor(slots)
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    return AttentionMetadata(
        query_start_loc=starts.to(torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=block_table,
        row_mapping=memory.row_mapping(group_id, slot_mapping),
        num_decodes=num_decodes,
        block_size=block_size,
        window=window,
    )


def cross_metadata_for(
    memory: PagedMemory,
    query_lens: Sequence[int],
    encoder_lens: Sequence[int],
    is_written: Sequence[bool],
    block_table: Tensor,
) -> AttentionMetadata:
    """Return the cross-attention of a step in which the encoder ran for some requests."""
    block_size = memory.config.groups[0].spec.block_size
    slots = [
        int(block_table[request, position // block_size]) * block_size + position % block_size
        for request, (length, written) in enumerate(zip(encoder_lens, is_written, strict=True))
        for position in range(length if written else 0)
    ]
    slot_mapping = torch.tensor(slots, dtype=torch.int64)
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
        seq_lens=torch.tensor(encoder_lens, dtype=torch.int32),
        block_table=block_table,
        row_mapping=memory.row_mapping(0, slot_mapping),
        num_decodes=sum(length == 1 for length in query_lens),
        block_size=block_size,
        causal=False,
    )


def to_device(metadata: AttentionMetadata, device: str) -> AttentionMetadata:
    """Return the same step, with its device-side tensors on the device."""
    return replace(
        metadata,
        block_table=metadata.block_table.to(device),
        row_mapping=metadata.row_mapping.to(device),
    )


def layer_of(memory: PagedMemory, layer_index: int) -> LayerKVCache:
    """Return views of one layer of the only group."""
    return memory.layer(0, layer_index)
