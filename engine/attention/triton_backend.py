"""Unified paged attention on CUDA: one Triton kernel for prefills, decodes and mixed steps.

Keys and values are always read in their pages; see :mod:`engine.attention.triton_kernels`. A model
has at most three kernels, independent of sequence lengths: one for steps of decodes only, one with
more queries per program for all others, and one that merges segments. Triton is imported when a
backend is created. Steps in which tokens see later ones, as in images, run in the torch backend.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import ClassVar

import torch
from torch import Tensor

from engine.attention.kernel_backend import KernelBackend
from engine.attention.metadata import AttentionMetadata, LayerCall, write_kv
from engine.attention.torch_backend import TorchBackend
from prefix_cache import LayerKVCache

_MAX_HEAD_DIM = 256
_MIN_BLOCK_SIZE = 16
# Rows of a program: the minimum for tensor cores, and the rows of a prefill.
_DECODE_ROWS, _PREFILL_ROWS = 16, 64
_MAX_SEGMENTS, _SEGMENT_KEYS = 16, 256
# Number of programs per multiprocessor that keeps a device busy.
_PROGRAMS_PER_SM = 4
_NO_LIMIT = 2**30  # positions of a window
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class _Launch:
    """Launch parameters of the kernel for all layers of a step.

    Attributes:
        query_start_loc: on the device, like ``seq_lens``.
        num_segments: programs per request and KV head.
        only_decodes: True if every request has one query token.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    num_segments: int
    only_decodes: bool


class TritonBackend(KernelBackend):
    """Attention on NVIDIA GPUs of compute capability 8.0 and later."""

    name: ClassVar[str] = "triton"
    dtypes = (torch.float16, torch.bfloat16, torch.float32)

    def __init__(self, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
        self._multiprocessors = _multiprocessors(device)
        # Placeholder for missing arguments: an argument of another type compiles another kernel.
        self._placeholder = torch.empty(0, device=device)
        self._launch: _Launch | None = None
        self._torch = TorchBackend(device, dtype)

    @classmethod
    def check_support(cls, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
        """Require CUDA, or a CPU with Triton's interpreter, as in tests; see :meth:`probe`."""
        if find_spec("triton") is None:
            raise ValueError("the triton backend needs the package triton, which is not installed")
        if block_size < _MIN_BLOCK_SIZE:
            raise ValueError(
                f"the triton backend needs a block_size of at least {_MIN_BLOCK_SIZE}, "
                f"got {block_size}"
            )
        if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") != "1":
            super().check_support(device, dtype, block_size)

    @classmethod
    def _attend_to_zeros(
        cls, device: torch.device, dtype: torch.dtype, block_size: int, head_dim: int
    ) -> None:
        if head_dim > _MAX_HEAD_DIM:
            raise ValueError(f"heads have at most {_MAX_HEAD_DIM} numbers, got {head_dim}")
        super()._attend_to_zeros(device, dtype, block_size, head_dim)

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Reset the previous launch; the first layer plans a new one for its heads."""
        self._launch = None
        if metadata.visible_ends is not None:
            self._torch.begin_step(metadata)

    def forward(self, call: LayerCall) -> Tensor:
        """See :meth:`AttentionBackend.forward`."""
        query, key, value, kv_cache, metadata, _ = call
        if metadata.visible_ends is not None:
            return self._torch.forward(call)
        if key.shape[0]:
            write_kv(key, value, kv_cache, metadata.row_mapping)
        if self._launch is None:
            self._launch = self._plan(metadata, key.shape[1])
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if not query.is_contiguous() and query.stride()[1:] != (query.shape[2], 1):
            query = query.contiguous()
        shape = _Shape.of(query, kv_cache, self._launch.only_decodes)
        self._attend(query, call, self._launch, shape, output)
        return output

    def _plan(self, metadata: AttentionMetadata, num_kv_heads: int) -> _Launch:
        """Use segments for decodes only: enough to keep the device busy, of at least 256 keys."""
        device = metadata.block_table.device
        num_reqs = metadata.num_reqs
        only_decodes = metadata.num_decodes == num_reqs
        num_segments = 1
        if only_decodes and num_reqs:
            target = _PROGRAMS_PER_SM * self._multiprocessors // (num_reqs * num_kv_heads)
            longest = -(-int(metadata.seq_lens.max()) // _SEGMENT_KEYS)
            num_segments = max(1, min(target, longest, _MAX_SEGMENTS))
        starts, lengths = metadata.query_start_loc, metadata.seq_lens
        if metadata.on_device is not None:
            starts, lengths = metadata.on_device
        return _Launch(
            starts.to(device, non_blocking=True),
            lengths.to(device, non_blocking=True),
            num_segments,
            only_decodes,
        )

    def _attend(
        self, query: Tensor, call: LayerCall, launch: _Launch, shape: _Shape, output: Tensor
    ) -> None:
        from engine.attention import triton_kernels as kernels

        metadata, scoring, kv_cache = call.metadata, call.scoring, call.kv_cache
        num_tokens, num_heads, head_dim = query.shape
        is_split = launch.num_segments > 1
        partial = stats = self._placeholder
        if is_split:
            rows = num_tokens, num_heads, launch.num_segments
            partial = query.new_empty(*rows, head_dim, dtype=torch.float32)
            stats = query.new_empty(*rows, 2, dtype=torch.float32)
        bias = scoring.bias
        capped = scoring.softcap is not None
        num_programs = num_tokens // shape.queries_per_program + metadata.num_reqs
        kernels.paged_attention[(num_programs, shape.num_kv_heads, launch.num_segments)](
            query,
            kv_cache.chunks,
            output,
            partial,
            stats,
            launch.query_start_loc,
            launch.seq_lens,
            metadata.block_table,
            self._placeholder if bias is None else bias,
            scoring.scale if capped else scoring.scale * _LOG2_E,
            scoring.softcap if capped else 1.0,
            query.stride(0),
            metadata.block_table.stride(0),
            metadata.num_reqs,
            launch.num_segments,
            _NO_LIMIT if metadata.window is None else metadata.window,
            int(metadata.causal),
            2 * kv_cache.layer_index,
            0 if bias is None else bias.shape[1],
            CHUNKS_PER_PAGE=kv_cache.chunks_per_page,
            BLOCK_SIZE=metadata.block_size,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=shape.num_kv_heads,
            HEAD_DIM=head_dim,
            PADDED_DIM=shape.padded_dim,
            BLOCK_M=shape.rows,
            BLOCK_N=shape.keys,
            IS_CAPPED=capped,
            DOT_DTYPE=kernels.dot_dtype(query.dtype),
            num_warps=shape.num_warps,
        )
        if is_split:
            kernels.merge_segments[(num_tokens * num_heads,)](
                partial,
                stats,
                output,
                launch.num_segments,
                HEAD_DIM=head_dim,
                PADDED_DIM=shape.padded_dim,
                MAX_SEGMENTS=_MAX_SEGMENTS,
            )


@dataclass(frozen=True, slots=True)
class _Shape:
    """Shape of a program of the kernel.

    Attributes:
        rows: number of queries times query heads per KV head.
        keys: number of keys per tile.
        padded_dim: the head's width, padded to a power of two for Triton.
    """

    rows: int
    keys: int
    padded_dim: int
    num_kv_heads: int
    queries_per_program: int
    num_warps: int

    @classmethod
    def of(cls, query: Tensor, kv_cache: LayerKVCache, only_decodes: bool) -> _Shape:
        num_heads, head_dim = query.shape[1:]
        num_kv_heads = kv_cache.keys.shape[1]
        group = num_heads // num_kv_heads
        padded_dim = max(16, _next_power_of_two(head_dim))
        keys = 64 if padded_dim <= 128 else 32
        max_rows = _PREFILL_ROWS
        if query.element_size() > 2:
            # Tensor cores do not multiply float32: each product uses registers.
            keys = max_rows = 16
        rows = max(_DECODE_ROWS if only_decodes else max_rows, _next_power_of_two(group))
        num_warps = 8 if rows * padded_dim >= 8192 else 4
        return cls(rows, keys, padded_dim, num_kv_heads, rows // group, num_warps)


def _next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is not less than the number."""
    return 1 << (number - 1).bit_length()


@cache
def _multiprocessors(device: torch.device) -> int:
    """Count multiprocessors; few for the interpreter, so that small tests use segments."""
    if device.type != "cuda":
        return 16
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
