"""The xformers biases of one step, made from lengths and tables alone.

Pure functions over the metadata, so that a machine without a GPU can check them: every bias
materialises to a dense mask on a CPU. xformers is imported when a mask is first made, because
the import takes seconds and warns on machines where it cannot run.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.attention.metadata import AttentionMetadata
from engine.attention.paged_rows import visible_blocks
from engine.attention.visibility import chunk_bounds, first_visible

if TYPE_CHECKING:
    from xformers.ops.fmha.attn_bias import (
        BlockDiagonalCausalFromBottomRightMask,
        BlockDiagonalMask,
        PagedBlockDiagonalGappyKeysMask,
        PagedBlockDiagonalPaddedKeysMask,
    )

__all__ = ["decode_bias", "prefill_bias", "prefill_slots", "with_a_key_for_all"]


def with_a_key_for_all(metadata: AttentionMetadata) -> tuple[AttentionMetadata, Tensor | None]:
    """Let requests that have nothing to see look at the null page, since no kernel runs on no key.

    Returns:
        The metadata with sequences of at least one key, and ``(num_tokens, 1, 1)`` booleans on the
        device that tell which tokens' output is void; None if none is.
    """
    empty = metadata.seq_lens == 0
    if not empty.any():
        return metadata, None
    table = metadata.block_table
    blind = empty.repeat_interleave(metadata.query_start_loc.diff())
    return replace(
        metadata,
        seq_lens=metadata.seq_lens.clamp(min=1),
        block_table=table if table.shape[1] else table.new_zeros(metadata.num_reqs, 1),
    ), blind[:, None, None].to(table.device)


def prefill_bias(
    metadata: AttentionMetadata, device: torch.device
) -> BlockDiagonalCausalFromBottomRightMask | BlockDiagonalMask:
    """Each prefill sees its own keys: all of them, or causally, its queries being its last tokens.

    Causal::

            keys of r0   keys of r1
    r0 q0 | x x x .    | . . . . . |     cached: 2 of 4 tokens
    r0 q1 | x x x x    | . . . . . |
    r1 q0 | . . . .    | x x x x x |     cached: 4 of 5 tokens

    The keys are those of :func:`prefill_slots`. Chunks of local attention are as good as requests
    of their own, whose keys follow each other. In xformers too a window counts the query.

    Without causality the blocks are full; rectangles in cross-attention, squares where the
    queries are the sequence itself, as in an encoder::

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
    queries: list[int] = []
    keys: list[int] = []
    for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
        bounds = chunk_bounds(seq_len - query_len, seq_len, metadata.chunk_size)
        firsts = first_visible(
            torch.tensor(bounds[:-1]), metadata.window, metadata.chunk_size
        ).tolist()
        queries += [end - start for start, end in pairwise(bounds)]
        keys += [end - first for end, first in zip(bounds[1:], firsts, strict=True)]
    bias = BlockDiagonalCausalFromBottomRightMask.from_seqlens(queries, keys, device=device)
    if metadata.window is None or metadata.window >= max(keys):
        return bias
    return BlockDiagonalCausalLocalAttentionFromBottomRightMask(
        q_seqinfo=bias.q_seqinfo, k_seqinfo=bias.k_seqinfo, _window_size=metadata.window
    )


def prefill_slots(metadata: AttentionMetadata) -> Tensor | None:
    """The slots of all keys that prefills see, request after request, without a loop.

    Keys of a request begin with the first that its first query sees.

    Returns:
        ``(keys,)`` int64 on the device; None when the step's own keys are all that there are:
        nothing is cached, and attention is causal.
    """
    query_lens = metadata.query_start_loc.diff()[metadata.num_decodes :]
    seq_lens = metadata.seq_lens[metadata.num_decodes :]
    if metadata.causal and torch.equal(query_lens, seq_lens):
        return None
    block_table = metadata.block_table[metadata.num_decodes :]
    # Those before a cross-attention's queries are no positions of its keys.
    before = seq_lens - query_lens if metadata.causal else torch.zeros_like(seq_lens)
    first = first_visible(before, metadata.window, metadata.chunk_size)
    first, end = (x.to(block_table.device)[:, None] for x in (first, seq_lens))
    slots = block_table.long()[:, :, None] * metadata.block_size
    slots = (slots + torch.arange(metadata.block_size, device=slots.device)).flatten(1)
    positions = torch.arange(slots.shape[1], device=slots.device)
    return slots[(positions >= first) & (positions < end)]


def decode_bias(
    metadata: AttentionMetadata, chunks_per_page: int
) -> PagedBlockDiagonalPaddedKeysMask | PagedBlockDiagonalGappyKeysMask:
    """One query per decode over paged keys.

    A page of the kernel is one chunk of the buffer (one layer's K or V of one block). The layer
    is in the shifted view, so that one table ``block_id * chunks_per_page`` serves all layers.

    Where windows or chunks hide the first tokens, the table holds visible blocks only, and the
    bias leaves out what is hidden in the first of them.

    Args:
        metadata: of the step.
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
    first = first_visible(seq_lens - 1, metadata.window, metadata.chunk_size)
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
    # As if sequence i began at key i * width; made paged, starts count from there.
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
