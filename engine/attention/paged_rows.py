"""Reading and writing the paged keys and values, as every backend does it."""

from __future__ import annotations

from torch import Tensor

from engine.attention.backend import AttentionMetadata
from prefix_cache import LayerKVCache

__all__ = ["layer_chunks", "query_lens", "write_kv"]


def write_kv(key: Tensor, value: Tensor, kv_cache: LayerKVCache, row_mapping: Tensor) -> None:
    """Store this step's keys and values ``(num_tokens, num_kv_heads, head_dim)``."""
    kv_cache.keys.index_copy_(0, row_mapping, key)
    kv_cache.values.index_copy_(0, row_mapping, value)


def layer_chunks(kv_cache: LayerKVCache) -> tuple[Tensor, Tensor]:
    """One layer's key chunks and value chunks, both indexed by ``page * chunks_per_page``.

    The shift of the layer is in the view, so that one index serves all layers of the group.

    Returns:
        Two views ``(chunks, block_size * num_kv_heads * head_dim)``.
    """
    chunks = kv_cache.chunks.flatten(1)
    first = 2 * kv_cache.layer_index
    return chunks[first:], chunks[first + 1 :]


def query_lens(metadata: AttentionMetadata) -> list[int]:
    """Tokens of each request in this step."""
    lengths: list[int] = metadata.query_start_loc.diff().tolist()
    return lengths
