"""Attention with xformers on CUDA.

Decodes read the pages in place, through Triton split-K and a paged bias. Prefills gather their keys
and run torch's flash attention with a block-diagonal bias: the paged kernels do not support long
causal queries. xformers supports neither soft caps nor biases with pages: such layers run in the
torch backend, as do steps in which tokens see later ones.

Biases are built by pure functions over the metadata, so that they can be tested without a GPU: each
materialises to a dense mask on a CPU. xformers is imported when a mask is first built, because the
import takes seconds and warns on machines where it cannot run.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from engine.attention.kernel_backend import KernelBackend
from engine.attention.metadata import (
    AttentionMetadata,
    LayerCall,
    first_visible,
    visible_blocks,
    write_kv,
)
from engine.attention.torch_backend import TorchBackend

if TYPE_CHECKING:
    from xformers.ops.fmha.attn_bias import (
        BlockDiagonalCausalFromBottomRightMask,
        BlockDiagonalMask,
        PagedBlockDiagonalGappyKeysMask,
        PagedBlockDiagonalPaddedKeysMask,
    )


def pad_empty_sequences(metadata: AttentionMetadata) -> tuple[AttentionMetadata, Tensor | None]:
    """Let requests with nothing to see attend to the null page, as kernels need at least one key.

    Returns:
        The metadata with sequences of at least one key, and ``(num_tokens, 1, 1)`` booleans on the
        device, True for tokens whose output is void; None if there are none.
    """
    empty = metadata.seq_lens == 0
    if not empty.any():
        return metadata, None
    table = metadata.block_table
    is_void = empty.repeat_interleave(metadata.query_start_loc.diff())
    return replace(
        metadata,
        seq_lens=metadata.seq_lens.clamp(min=1),
        block_table=table if table.shape[1] else table.new_zeros(metadata.num_reqs, 1),
    ), is_void[:, None, None].to(table.device)


def prefill_bias(
    metadata: AttentionMetadata, device: torch.device
) -> BlockDiagonalCausalFromBottomRightMask | BlockDiagonalMask:
    """Build the block-diagonal bias of the prefills, causal from the bottom right or full.

    Causal::

            keys of r0   keys of r1
    r0 q0 | x x x .    | . . . . . |     cached: 2 of 4 tokens
    r0 q1 | x x x x    | . . . . . |
    r1 q0 | . . . .    | x x x x x |     cached: 4 of 5 tokens

    The keys are those of :func:`prefill_slots`. As here, windows of xformers include the query.

    Without causality the blocks are full: rectangles in cross-attention, squares if the queries
    are the sequence itself, as in an encoder::

            keys of r0   keys of r1
    r0 q0 | x x x x    | . . . . . |
    r0 q1 | x x x x    | . . . . . |
    r1 q0 | . . . .    | x x x x x |
    """
    from xformers.ops.fmha.attn_bias import (
        BlockDiagonalCausalFromBottomRightMask,
        BlockDiagonalCausalLocalAttentionFromBottomRightMask,
        BlockDiagonalMask,
    )

    prefills = slice(metadata.num_decodes, None)
    query_lens = metadata.query_start_loc.diff()[prefills].tolist()
    seq_lens = metadata.seq_lens[prefills].tolist()
    if not metadata.causal:
        return BlockDiagonalMask.from_seqlens(query_lens, seq_lens, device=device)
    starts = metadata.seq_lens[prefills] - metadata.query_start_loc.diff()[prefills]
    keys = (metadata.seq_lens[prefills] - first_visible(starts, metadata.window)).tolist()
    bias = BlockDiagonalCausalFromBottomRightMask.from_seqlens(query_lens, keys, device=device)
    if metadata.window is None or metadata.window >= max(keys):
        return bias
    return BlockDiagonalCausalLocalAttentionFromBottomRightMask(
        q_seqinfo=bias.q_seqinfo, k_seqinfo=bias.k_seqinfo, _window_size=metadata.window
    )


def prefill_slots(metadata: AttentionMetadata) -> Tensor | None:
    """Compute the slots of all keys that prefills see, request after request, without a loop.

    The keys of a request begin with the first that its first query sees.

    Returns:
        ``(keys,)`` int64 on the device; None if there are no keys but the step's own: nothing is
        cached, and attention is causal.
    """
    query_lens = metadata.query_start_loc.diff()[metadata.num_decodes :]
    seq_lens = metadata.seq_lens[metadata.num_decodes :]
    if metadata.causal and torch.equal(query_lens, seq_lens):
        return None
    block_table = metadata.block_table[metadata.num_decodes :]
    # The queries of cross-attention have no position among its keys.
    before = seq_lens - query_lens if metadata.causal else torch.zeros_like(seq_lens)
    first = first_visible(before, metadata.window)
    first, end = (x.to(block_table.device)[:, None] for x in (first, seq_lens))
    slots = block_table.long()[:, :, None] * metadata.block_size
    slots = (slots + torch.arange(metadata.block_size, device=slots.device)).flatten(1)
    positions = torch.arange(slots.shape[1], device=slots.device)
    return slots[(positions >= first) & (positions < end)]


def decode_bias(
    metadata: AttentionMetadata, chunks_per_page: int
) -> PagedBlockDiagonalPaddedKeysMask | PagedBlockDiagonalGappyKeysMask:
    """Build the bias of one query per decode over paged keys.

    A page of the kernel is one chunk of the buffer (one layer's K or V of one block). The view
    includes the layer's offset, so one table ``block_id * chunks_per_page`` serves all layers.

    If windows hide the first tokens, the table contains only visible blocks, and the bias excludes
    the hidden tokens of the first one.

    Args:
        chunks_per_page: from :class:`prefix_cache.LayerKVCache`.
    """
    from xformers.ops.fmha.attn_bias import (
        BlockDiagonalGappyKeysMask,
        PagedBlockDiagonalGappyKeysMask,
        PagedBlockDiagonalPaddedKeysMask,
    )

    count, page_size = metadata.num_decodes, metadata.block_size
    seq_lens, block_table = metadata.seq_lens[:count], metadata.block_table[:count]
    device = block_table.device
    first = first_visible(seq_lens - 1, metadata.window)
    if not first.any():
        return PagedBlockDiagonalPaddedKeysMask.from_seqlens(
            q_seqlen=[1] * count,
            kv_seqlen=seq_lens.tolist(),
            block_tables=(block_table * chunks_per_page).to(torch.int32).contiguous(),
            page_size=page_size,
            device=device,
        )
    block_table = visible_blocks(block_table, first, seq_lens, page_size)
    width = block_table.shape[1] * page_size
    # As if sequence i began at key i * width; make_paged makes starts relative to that.
    starts = first % page_size + torch.arange(count) * width
    gappy = BlockDiagonalGappyKeysMask.from_seqlens(
        q_seqlen=[1] * count,
        kv_seqstarts=[*starts.tolist(), count * width],
        kv_seqlen=(seq_lens - first).tolist(),
        device=device,
    )
    return gappy.make_paged(
        block_tables=(block_table * chunks_per_page).to(torch.int32).contiguous(),
        page_size=page_size,
        notional_padding=width,
        paged_type=PagedBlockDiagonalGappyKeysMask,
    )


# Numbers of keys that split-K reads at once; a page must be a multiple of such a tile.
_KEY_TILES = (64, 32, 16)


class XformersBackend(KernelBackend):
    """Attention on NVIDIA GPUs of compute capability 8.0 and later, in half precision."""

    name: ClassVar[str] = "xformers"
    dtypes = (torch.float16, torch.bfloat16)

    def __init__(self, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
        self._device = device
        self._key_tile = _key_tile(block_size)
        # Built in the first layer of a step, whose cache defines the geometry of the pages.
        self._decode_bias: Any = None
        self._prefill_bias: Any = None
        self._prefill_rows: Tensor | None = None
        self._void_tokens: Tensor | None = None
        self._ready = False
        self._torch = TorchBackend(device, dtype)
        self._torch_ready = False

    @classmethod
    def check_support(cls, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
        """Require CUDA, half precision, and a block size divisible by 16; see :meth:`probe`."""
        _key_tile(block_size)
        super().check_support(device, dtype, block_size)

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Reset the previous step; see :meth:`_prepare`."""
        self._ready = self._torch_ready = False

    def _prepare(self, metadata: AttentionMetadata, chunks_per_page: int) -> None:
        """Build the biases, and the rows that prefills gather."""
        self._decode_bias = self._prefill_bias = self._prefill_rows = None
        metadata, self._void_tokens = pad_empty_sequences(metadata)
        if metadata.num_decodes:
            self._decode_bias = decode_bias(metadata, chunks_per_page)
        if metadata.num_decodes < metadata.num_reqs:
            self._prefill_bias = prefill_bias(metadata, self._device)
            slots = prefill_slots(metadata)
            if slots is not None:
                block_size = metadata.block_size
                rows_between_pages = (chunks_per_page - 1) * block_size
                self._prefill_rows = slots + slots // block_size * rows_between_pages
        self._ready = True

    def forward(self, call: LayerCall) -> Tensor:
        """See :meth:`AttentionBackend.forward`."""
        query, key, value, kv_cache, metadata, scoring = call
        if not scoring.only_scales or metadata.visible_ends is not None:
            if not self._torch_ready:
                self._torch.begin_step(metadata)
                self._torch_ready = True
            return self._torch.forward(call)
        if not self._ready:
            self._prepare(metadata, kv_cache.chunks_per_page)
        write_kv(key, value, kv_cache, metadata.row_mapping)
        parts: list[Tensor] = []
        if self._decode_bias is not None:
            # The kernel requires views of equal length. The cut-off part contains no key: the last
            # chunk of the buffer is a value chunk, of this layer or of a later one.
            keys = kv_cache.keys[: kv_cache.values.shape[0]]
            decodes = query[: metadata.num_decodes]
            attended = self._attend(
                decodes, keys, kv_cache.values, self._decode_bias, scoring.scale, paged=True
            )
            parts.append(attended)
        if self._prefill_bias is not None:
            prefills = query[metadata.num_decodes :]
            if self._prefill_rows is None:
                keys, values = key[metadata.num_decodes :], value[metadata.num_decodes :]
            else:
                keys = kv_cache.keys.index_select(0, self._prefill_rows)
                values = kv_cache.values.index_select(0, self._prefill_rows)
            attended = self._attend(
                prefills, keys, values, self._prefill_bias, scoring.scale, paged=False
            )
            parts.append(attended)
        output = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self._void_tokens is not None:
            output = output.masked_fill(self._void_tokens, 0.0)
        return output

    def _attend(
        self, query: Tensor, keys: Tensor, values: Tensor, bias: Any, scale: float, *, paged: bool
    ) -> Tensor:
        """Call xformers with packed tokens ``(tokens, heads, head_dim)``."""
        from xformers.ops.fmha import memory_efficient_attention_forward

        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = keys.shape[1]
        group = num_heads // num_kv_heads
        query = query.reshape(1, num_tokens, num_kv_heads, group, head_dim)
        # Grouped heads are expressed by a stride of 0, not by copies.
        keys = keys[None, :, :, None].expand(-1, -1, -1, group, -1)
        values = values[None, :, :, None].expand(-1, -1, -1, group, -1)
        operator = _split_k_operator(self._key_tile) if paged else None
        attended = memory_efficient_attention_forward(
            query, keys, values, attn_bias=bias, scale=scale, op=operator
        )
        return attended.reshape(num_tokens, num_heads, head_dim)


def _key_tile(block_size: int) -> int:
    """Return the largest tile of keys that divides a page."""
    for tile in _KEY_TILES:
        if block_size % tile == 0:
            return tile
    raise ValueError(
        f"the xformers backend needs a block_size that is a multiple of {_KEY_TILES[-1]}, "
        f"got {block_size}"
    )


@cache
def _split_k_operator(key_tile: int) -> Any:
    """Create a Triton split-K operator that reads ``key_tile`` keys at once, for small pages."""
    from xformers.ops.fmha import triton_splitk

    name = f"{triton_splitk.FwOp.NAME}_pages{key_tile}"
    return type(name, (triton_splitk.FwOp,), {"BLOCK_N": key_tile, "NAME": name})
