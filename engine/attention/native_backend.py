"""Attention on a CPU with C kernels: decodes read the pages in place, prefills run as in torch.

What this saves is memory traffic. A gather writes every key and value of every sequence once and
reads it again; the kernel reads it where it lies, once for all heads, and blocks that several
requests share mostly come from the processor's cache.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from engine.attention.backend import AttentionMetadata
from engine.attention.torch_backend import TorchBackend
from engine.native import NativeBuildError, load_kernels
from prefix_cache import LayerKVCache

__all__ = ["NativeBackend"]

# Sequences are cut into parts while threads would idle, but not into shorter ones than this.
_TASKS_PER_THREAD = 4
_MIN_PART_TOKENS = 64


class NativeBackend(TorchBackend):
    """Attention in float32 on a CPU that has a C compiler, or had one when it was first used.

    Args:
        device: the CPU.
        dtype: float32.

    Raises:
        NativeBuildError: the kernels cannot be had; see :meth:`check_support`.
    """

    name: ClassVar[str] = "native"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self._kernels = load_kernels()
        self._block_table = torch.empty(0, 0, dtype=torch.int32)
        self._largest_block_id = 0
        self._num_parts = 1

    @classmethod
    def check_support(cls, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
        """A CPU, float32, and kernels that build and load."""
        if device.type != "cpu":
            raise ValueError(f"the native backend runs on CPUs only, not on {device}")
        if dtype != torch.float32:
            raise ValueError(f"the native backend needs float32, got {dtype}")
        try:
            load_kernels()
        except NativeBuildError as error:
            raise ValueError(f"the native backend cannot run here: {error}") from error

    def _begin_decodes(self, metadata: AttentionMetadata) -> None:
        """Check what the kernel will follow blindly, once for all layers."""
        num_decodes = metadata.num_decodes
        if not num_decodes:
            return
        seq_lens = metadata.seq_lens[:num_decodes]
        table = metadata.block_table[:num_decodes].contiguous()
        shortest, longest = (int(length) for length in seq_lens.aminmax())
        lowest, self._largest_block_id = (int(block_id) for block_id in table.aminmax())
        capacity = table.shape[1] * metadata.block_size
        if shortest < 1 or longest > capacity or lowest < 0:
            raise ValueError(
                f"sequences of {shortest} to {longest} tokens do not fit a block table of "
                f"{capacity} tokens, lowest block id {lowest}"
            )
        if table.dtype != torch.int32 or seq_lens.dtype != torch.int32:
            raise ValueError(f"expected int32 tables, got {table.dtype} and {seq_lens.dtype}")
        self._block_table = table
        wanted = -(-_TASKS_PER_THREAD * torch.get_num_threads() // num_decodes)
        self._num_parts = max(1, min(wanted, longest // _MIN_PART_TOKENS))

    def _attend_decodes(
        self,
        query: Tensor,
        kv_cache: LayerKVCache,
        metadata: AttentionMetadata,
        scale: float,
        output: Tensor,
    ) -> None:
        """See :meth:`TorchBackend._attend_decodes`."""
        num_pages = kv_cache.chunks.shape[0] // kv_cache.chunks_per_page
        if self._largest_block_id >= num_pages:
            raise ValueError(f"block id {self._largest_block_id} in a pool of {num_pages} blocks")
        batch, num_heads, head_dim = query.shape
        self._kernels.decode_attention(
            query,
            kv_cache.keys,
            kv_cache.values,
            self._block_table,
            metadata.seq_lens,
            block_size=metadata.block_size,
            chunks_per_page=kv_cache.chunks_per_page,
            scale=scale,
            partial=query.new_empty(batch, self._num_parts, num_heads, head_dim + 2),
            output=output,
        )
