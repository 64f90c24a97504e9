"""The byte buffer that holds every layer's keys and values, and the views attention reads it by.

Layout of one small page of a group of ``L`` layers (house name: block-major)::

    page p
    ┌ layer 0 ────────────┬ layer 1 ────────────┬ ... ┬ layer L-1 ──────────┐
    │ K: bs rows │ V: bs  │ K: bs rows │ V: bs  │     │ K: bs rows │ V: bs  │
    └────────────┴────────┴────────────┴────────┴─────┴────────────┴────────┘
      one row = (num_kv_heads, head_dim) of one token

so the buffer is also one flat tensor of rows, and one index per token serves all layers::

    row(p, t; layer l, K) = p * 2L * bs + t  +  (2l)     * bs
    row(p, t; layer l, V) = p * 2L * bs + t  +  (2l + 1) * bs
                            └ row_mapping ─┘    └ a shifted view ┘
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prefix_cache.kv_cache_spec import FullAttentionSpec, KVCacheConfig

__all__ = ["LayerKVCache", "PagedMemory"]


@dataclass(frozen=True, slots=True)
class LayerKVCache:
    """One layer's keys and values inside the shared buffer. Views only; nothing is owned.

    Attributes:
        keys: ``(rows, num_kv_heads, head_dim)``; row ``row_mapping[i]`` is token i's key.
        values: the same, shifted by one page slice, so that it takes the same index.
        chunks: ``(num_blocks * 2L, block_size, num_kv_heads, head_dim)``: the buffer cut into
            one chunk per (page, layer, K or V). This layer's key chunk of page p is
            ``p * 2L + 2 * layer_index``, its value chunk the one after.
        layer_index: the layer's place in its group.
        chunks_per_page: ``2L``.
    """

    keys: Tensor
    values: Tensor
    chunks: Tensor
    layer_index: int
    chunks_per_page: int


class PagedMemory:
    """One buffer of bytes on one device, divided into pages of ``KVCacheConfig.groups``.

    Args:
        config: the geometry. Only one group of full attention is laid out so far; more groups
            need pages of different sizes, which this class says rather than guesses.
        device: where the buffer lives.

    Raises:
        NotImplementedError: for more than one group, or a group that is not full attention.
    """

    def __init__(self, config: KVCacheConfig, device: torch.device | str = "cpu") -> None:
        if len(config.groups) != 1:
            raise NotImplementedError(
                f"one KV-cache group is supported, the model has {len(config.groups)}: "
                + ", ".join(type(group.spec).__name__ for group in config.groups)
            )
        self.config = config
        self.nbytes = config.num_blocks * config.groups[0].page_bytes
        # Zeros, not empty: kernels may read the null block, and NaN * 0 is not 0.
        self.buffer = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)

    def layer(self, group_id: int, layer_index: int) -> LayerKVCache:
        """The views of the ``layer_index``-th layer of a group."""
        group = self.config.groups[group_id]
        spec = group.spec
        if not isinstance(spec, FullAttentionSpec):
            raise NotImplementedError(f"no page layout for {type(spec).__name__}")
        chunks_per_page = 2 * len(group.layer_names)
        row_shape = (spec.num_kv_heads, spec.head_dim)
        rows = self.buffer.view(spec.dtype).view(-1, *row_shape)
        key_shift = 2 * layer_index * spec.block_size
        return LayerKVCache(
            keys=rows[key_shift:],
            values=rows[key_shift + spec.block_size :],
            chunks=rows.view(-1, spec.block_size, *row_shape),
            layer_index=layer_index,
            chunks_per_page=chunks_per_page,
        )

    def clear_page(self, group_id: int, page_id: int) -> None:
        """Fill a page with zeros.

        For a page that a step fills in part: kernels may read it to its end, and although they
        give no weight to what lies behind the sequence, NaN or infinity left there by an earlier
        one would spoil the sum.
        """
        page_bytes = self.config.groups[group_id].page_bytes
        self.buffer[page_id * page_bytes : (page_id + 1) * page_bytes].zero_()

    def row_mapping(self, group_id: int, slot_mapping: Tensor) -> Tensor:
        """Turn slots (``block_id * block_size + offset``) into row indices of layer 0's keys.

        Args:
            slot_mapping: ``(num_tokens,)`` integers.

        Returns:
            ``(num_tokens,)`` of the same type and device.
        """
        group = self.config.groups[group_id]
        block_size = group.spec.block_size
        extra_rows_per_page = (2 * len(group.layer_names) - 1) * block_size
        return slot_mapping + (slot_mapping // block_size) * extra_rows_per_page
