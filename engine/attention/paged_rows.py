"""Reading and writing the paged keys and values, as every backend does it."""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_cache import LayerKVCache

__all__ = ["layer_chunks", "visible_blocks", "write_kv"]


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


def visible_blocks(
    block_table: Tensor, first_visible: Tensor, seq_lens: Tensor, block_size: int
) -> Tensor:
    """A block table of nothing but what is visible, so that no other page is ever read.

    What lies before a window may be another request's by now, and the null block holds anything:
    weights of 0 would not do, as 0 * NaN is NaN. Short rows repeat their own last block::

        table      | a b c d e 0 0 |  visible from block 2 on   ->   | c d e |
                   | f g h 0 0 0 0 |                from 1 on        | g h h |

    Args:
        block_table: ``(num_reqs, blocks)``.
        first_visible: ``(num_reqs,)`` on the CPU: the first position that is visible.
        seq_lens: ``(num_reqs,)`` on the CPU.
        block_size: tokens per block.

    Returns:
        ``(num_reqs, most visible blocks)``.
    """
    first = first_visible.long() // block_size
    last = (seq_lens.long() - 1) // block_size
    columns = first[:, None] + torch.arange(int((last - first).max()) + 1)
    columns = torch.minimum(columns, last[:, None])
    return block_table.gather(1, columns.to(block_table.device))
