"""Attention on a CPU with C kernels that read the pages in place.

This saves memory traffic. A gather writes every key and value of every sequence once and reads it
again; the kernel reads it in place, once for all heads, and blocks that several requests share
mostly come from the processor's cache. The kernel does not distinguish decodes from short prefills:
a query token is a span of positions of its sequence::

    tokens   | d0 | p0 p0 p0 |      d0: sequence of 9 tokens, p0: of 5, 2 of them cached
    row        0    1  1  1         row of the block table
    start      0    0  0  0         first visible position; with a window of 4: 5 0 0 1
    end        9    3  4  5         one past the last visible position

Without causality the span of every token is its request's whole sequence, which may be empty.
Long prefills do enough arithmetic per key to pay for a gather: they run as in the torch backend.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from engine.attention.metadata import AttentionMetadata, LayerCall, first_visible
from engine.attention.torch_backend import TorchBackend, allocate_output
from engine.native import NativeBuildError, PagedSpans, load_kernels
from engine.native.kernels import PART_TOKENS

# Sequences are split into parallel parts if a step has fewer query tokens per thread than this.
_TASKS_PER_THREAD = 4
# From this many query tokens on, torch's products are faster than reading keys token by token.
_LONG_QUERY = 256
_NO_SPANS = PagedSpans(torch.empty(0, 0, dtype=torch.int32), torch.empty(3, 0, dtype=torch.int32))


class NativeBackend(TorchBackend):
    """Attention in float32 on a CPU; needs a C compiler on first use.

    Pages may be bfloat16: keys and values are rounded when they are written, even if a long
    prefill does not read them back, so that every query sees the same key.

    Args:
        deterministic: if true, run long prefills in the kernel as well, which is slower. The
            output bits of a token then do not depend on the rest of the step.

    Raises:
        NativeBuildError: the kernels are not available; see :meth:`check_support`.
    """

    name: ClassVar[str] = "native"

    def __init__(
        self, device: torch.device, dtype: torch.dtype, *, deterministic: bool = False
    ) -> None:
        super().__init__(device, torch.float32)
        self._deterministic = deterministic
        self._kernels = load_kernels()
        # Spans of all tokens of the step, and of those before its long prefills.
        self._spans = self._short_spans = _NO_SPANS
        self._largest_block_id = self._largest_row = 0

    @classmethod
    def check_support(cls, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
        """Require a CPU, float32 or bfloat16 pages, and kernels that build and load."""
        if device.type != "cpu":
            raise ValueError(f"the native backend runs on CPUs only, not on {device}")
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"the native backend needs float32 or bfloat16, got {dtype}")
        try:
            load_kernels()
        except NativeBuildError as error:
            raise ValueError(f"the native backend cannot run here: {error}") from error

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Compute the spans and check indices, which kernels do not check, once for all layers."""
        table, rows = metadata.block_table.contiguous(), metadata.row_mapping
        if table.dtype != torch.int32 or rows.dtype != torch.int64:
            raise ValueError(f"expected int32 tables, int64 rows, got {table.dtype}, {rows.dtype}")
        spans = _visible_spans(metadata)
        shortest, longest = _extremes(spans[2])
        lowest, self._largest_block_id = _extremes(table)
        lowest_row, self._largest_row = _extremes(rows)
        capacity = table.shape[1] * metadata.block_size
        if shortest < metadata.causal or longest > capacity or lowest < 0 or lowest_row < 0:
            raise ValueError(
                f"sequences of {shortest} to {longest} tokens do not fit a block table of "
                f"{capacity} tokens, lowest block id {lowest}, lowest row {lowest_row}"
            )
        num_tokens = spans.shape[1]
        num_parts = 1
        if longest > PART_TOKENS and num_tokens < _TASKS_PER_THREAD * torch.get_num_threads():
            parts = (spans[2] + PART_TOKENS - 1) // PART_TOKENS - spans[1] // PART_TOKENS
            num_parts = max(1, int(parts.max()))
        self._spans = self._short_spans = PagedSpans(table, spans, num_parts)
        self._prefills = []
        # A long prefill requires that the step as a whole is that long.
        if num_tokens >= _LONG_QUERY and not self._deterministic:
            query_lens = metadata.query_start_loc.diff()
            num_short = int((query_lens < _LONG_QUERY).cumprod(0).sum())
            num_short_tokens = int(metadata.query_start_loc[num_short])
            self._short_spans = PagedSpans(table, spans[:, :num_short_tokens], num_parts)
            self._lay_out_prefills(metadata, num_short)

    def forward(self, call: LayerCall) -> Tensor:
        """See :meth:`AttentionBackend.forward`."""
        query, key, value, kv_cache, metadata, scoring = call
        num_pages = kv_cache.chunks.shape[0] // kv_cache.chunks_per_page
        if self._largest_block_id >= num_pages:
            raise ValueError(f"block id {self._largest_block_id} in a pool of {num_pages} blocks")
        if self._largest_row >= kv_cache.values.shape[0]:
            raise ValueError(
                f"row {self._largest_row} in a layer of {kv_cache.values.shape[0]} rows"
            )
        self._kernels.write_kv(key, value, kv_cache.keys, kv_cache.values, metadata.row_mapping)
        # torch's fused products do not support a soft cap.
        attend, (scale, softcap, bias) = self._kernels.paged_attention, scoring
        if bias is not None:
            bias = bias.contiguous()
        if softcap is not None or not self._prefills:
            return attend(query, kv_cache, self._spans, scale, softcap, bias)
        if kv_cache.values.dtype != query.dtype:
            half = kv_cache.values.dtype
            key, value = key.to(half).to(key.dtype), value.to(half).to(value.dtype)
            call = call._replace(key=key, value=value)
        output = allocate_output(query, metadata)
        num_short = self._short_spans.spans.shape[1]
        if num_short:
            short = query[:num_short]
            output[:num_short] = attend(short, kv_cache, self._short_spans, scale, None, bias)
        self._attend_prefills(call, output)
        return output


def _extremes(indices: Tensor) -> tuple[int, int]:
    """Return the minimum and maximum, or zeros if there are no indices."""
    if indices.numel() == 0:
        return 0, 0
    lowest, largest = indices.aminmax()
    return int(lowest), int(largest)


def _visible_spans(metadata: AttentionMetadata) -> Tensor:
    """Compute row, start and end of each token's span, ``(3, num_tokens)``; see the module."""
    query_start_loc, seq_lens = metadata.query_start_loc.numpy(), metadata.seq_lens.numpy()
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    num_tokens = int(query_start_loc[-1])
    spans = np.empty((3, num_tokens), dtype=np.int32)
    spans[0] = np.arange(len(query_lens)).repeat(query_lens)
    if not metadata.causal:
        spans[1], spans[2] = 0, seq_lens.repeat(query_lens)
        return torch.from_numpy(spans)
    # Index of the token in the step, plus the offset of its request.
    spans[2] = np.arange(1, num_tokens + 1)
    spans[2] += (seq_lens - query_start_loc[1:]).repeat(query_lens)
    spans[1] = first_visible(torch.from_numpy(spans[2] - 1), metadata.window).numpy()
    if metadata.visible_ends is not None:
        spans[2] = metadata.visible_ends.numpy()
    return torch.from_numpy(spans)
