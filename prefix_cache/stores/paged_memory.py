"""Byte buffer that holds every layer's keys and values, and the views through which it is read.

Layout of one small page of a group of ``L`` layers ("block-major" in this project)::

    page p
    ┌ layer 0 ────────────┬ layer 1 ────────────┬ ... ┬ layer L-1 ──────────┐
    │ K: bs rows │ V: bs  │ K: bs rows │ V: bs  │     │ K: bs rows │ V: bs  │
    └────────────┴────────┴────────────┴────────┴─────┴────────────┴────────┘
      one row = (num_kv_heads, head_dim) of one token

so the buffer is also one flat tensor of rows, and one index per token serves all layers::

    row(p, t; layer l, K) = p * 2L * bs + t  +  (2l)     * bs
    row(p, t; layer l, V) = p * 2L * bs + t  +  (2l + 1) * bs
                            └ row_mapping ─┘    └ a shifted view ┘

(a padded page has more than ``2L`` chunks). A page of a recurrent group holds one state: layer
after layer, tensor after tensor, each aligned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefix_cache.specs.kv_cache_spec import AttentionSpec, KVCacheConfig, MambaSpec

SlotsT = TypeVar("SlotsT", Tensor, npt.NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class LayerKVCache:
    """Views of one layer's keys and values inside the shared buffer.

    Attributes:
        keys: ``(rows, num_kv_heads, head_dim)``; row ``row_mapping[i]`` is token i's key.
        values: the same, shifted by one chunk, so that the same index applies.
        chunks: ``(num_blocks * chunks_per_page, block_size, num_kv_heads, head_dim)``: the buffer
            divided into one chunk per (page, layer, K or V). This layer's key chunk of page p is
            ``p * chunks_per_page + 2 * layer_index``, its value chunk the one after.
        layer_index: index of the layer in its group.
        chunks_per_page: ``2L``, or more if pages are padded.
    """

    keys: Tensor
    values: Tensor
    chunks: Tensor
    layer_index: int
    chunks_per_page: int


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Pages of one group to copy, in order.

    Attributes:
        sources: page ids to copy from.
        targets: page ids to copy to, equally many.
    """

    group_id: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]


class PagedMemory:
    """One byte buffer on one device, divided into pages of ``KVCacheConfig.groups``.

    Every group views the whole buffer as pages of its own size;
    :class:`prefix_cache.BlockPool` assigns pages to groups.
    """

    def __init__(self, config: KVCacheConfig, device: torch.device | str = "cpu") -> None:
        self.config = config
        self.nbytes = config.num_large_pages * config.large_page_bytes
        # Zeros, not empty: kernels may read the null block, and NaN * 0 is not 0.
        self.buffer = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        # Per group, the block size, and the rows between the end of a block and the next page.
        self._extra_rows: dict[int, tuple[int, int]] = {}

    def layer(self, group_id: int, layer_index: int) -> LayerKVCache:
        """Return the views of the ``layer_index``-th layer of an attention group."""
        spec = self._attention_spec(group_id)
        row_shape = (spec.num_kv_heads, spec.head_dim)
        rows = self.buffer.view(spec.dtype).view(-1, *row_shape)
        key_shift = 2 * layer_index * spec.block_size
        return LayerKVCache(
            keys=rows[key_shift:],
            values=rows[key_shift + spec.block_size :],
            chunks=rows.view(-1, spec.block_size, *row_shape),
            layer_index=layer_index,
            chunks_per_page=self._chunks_per_page(group_id),
        )

    def state(self, group_id: int, layer_index: int) -> tuple[Tensor, ...]:
        """Return the states of the ``layer_index``-th layer of a recurrent group.

        Each tensor of the spec is a view ``(num_blocks, *shape)`` with a stride of one page.
        """
        group = self.config.groups[group_id]
        if not isinstance(group.spec, MambaSpec):
            raise ValueError(f"group {group_id} ({type(group.spec).__name__}) keeps no states")
        offset = layer_index * group.spec.layer_page_bytes
        views = []
        for state in group.spec.states:
            itemsize = state.dtype.itemsize
            elements = self.buffer.view(state.dtype)
            strides = torch.empty(state.shape, device="meta").stride()
            views.append(
                elements.as_strided(
                    (self.config.num_blocks(group_id), *state.shape),
                    (group.page_bytes // itemsize, *strides),
                    offset // itemsize,
                )
            )
            offset += state.nbytes
        return tuple(views)

    def clear_page(self, group_id: int, page_id: int) -> None:
        """Fill a page with zeros.

        For a page that a step fills in part: kernels may read it to its end. They give no weight
        to rows after the sequence, but an old NaN there would still corrupt the sum.
        """
        page_bytes = self.config.groups[group_id].page_bytes
        self.buffer[page_id * page_bytes : (page_id + 1) * page_bytes].zero_()

    def copy_pages(self, copy: PageCopy, target: PagedMemory) -> None:
        """Copy pages of one group, byte for byte, to memory of the same geometry."""
        page_bytes = self.config.groups[copy.group_id].page_bytes
        pages = self.buffer.view(-1, page_bytes)
        sources = torch.tensor(copy.sources, device=pages.device)
        targets = torch.tensor(copy.targets, device=target.buffer.device)
        moved = pages.index_select(0, sources).to(target.buffer.device)
        target.buffer.view(-1, page_bytes).index_copy_(0, targets, moved)

    def read_pages(self, group_id: int, page_ids: Sequence[int]) -> Sequence[Tensor]:
        """Return the content of pages, ``(content_bytes,)`` uint8 each: CPU views, or copies.

        On a CPU, torch would copy with several threads and wait for those that get no core.
        """
        group = self.config.groups[group_id]
        pages = self.buffer.view(-1, group.page_bytes)[:, : group.content_bytes]
        if pages.is_cpu:
            return [pages[page_id] for page_id in page_ids]
        index = torch.tensor(page_ids, device=pages.device)
        return list(pages.index_select(0, index).cpu())

    def write_page(self, group_id: int, page_id: int, content: Tensor) -> None:
        """Write the content of a page, as returned by :meth:`read_pages`."""
        group = self.config.groups[group_id]
        self.buffer.view(-1, group.page_bytes)[page_id, : group.content_bytes] = content

    def write_rows(self, page_ids: Sequence[int], rows: Tensor) -> None:
        """Write an item's rows, ``(num_rows, width)``, to its pages, as one byte string."""
        size = self.config.item_page_bytes
        pages, flat = self.buffer.view(-1, size), rows.contiguous().view(-1).view(torch.uint8)
        num_full, rest = divmod(len(flat), size)
        index = torch.tensor(page_ids, device=pages.device)
        pages.index_copy_(0, index[:num_full], flat[: num_full * size].view(-1, size))
        if rest:
            pages[page_ids[num_full], :rest] = flat[num_full * size :]

    def read_rows(
        self, page_ids: Sequence[int], rows: slice, width: int, dtype: torch.dtype
    ) -> Tensor:
        """Copy a slice of an item's rows, ``(num_rows, width)``, from its pages."""
        size, row_bytes = self.config.item_page_bytes, width * dtype.itemsize
        first, stop = rows.start * row_bytes, rows.stop * row_bytes
        begin = first // size
        index = torch.tensor(page_ids[begin : -(-stop // size)], device=self.buffer.device)
        flat = self.buffer.view(-1, size).index_select(0, index).view(-1)
        found = flat[first - begin * size : stop - begin * size]
        return found.view(dtype).view(-1, width)

    def clear_null_page(self) -> None:
        """Fill the null page of all groups with zeros, after something was written to it."""
        self.buffer[: self.config.large_page_bytes].zero_()

    def row_mapping(self, group_id: int, slot_mapping: SlotsT) -> SlotsT:
        """Convert slots (``block_id * block_size + offset``) to row indices of layer 0's keys.

        Args:
            group_id: id of an attention group.
            slot_mapping: ``(num_tokens,)`` integers, in numpy or a tensor.

        Returns:
            ``(num_tokens,)`` of the same type and device.
        """
        if group_id not in self._extra_rows:
            block_size = self._attention_spec(group_id).block_size
            extra_rows = (self._chunks_per_page(group_id) - 1) * block_size
            self._extra_rows[group_id] = block_size, extra_rows
        block_size, extra_rows = self._extra_rows[group_id]
        return slot_mapping + (slot_mapping // block_size) * extra_rows

    def _chunks_per_page(self, group_id: int) -> int:
        group = self.config.groups[group_id]
        return group.page_bytes // self._attention_spec(group_id).page_unit_bytes

    def _attention_spec(self, group_id: int) -> AttentionSpec:
        spec = self.config.groups[group_id].spec
        if not isinstance(spec, AttentionSpec):
            raise ValueError(f"group {group_id} ({type(spec).__name__}) keeps no keys and values")
        return spec
