"""Triton kernels of unified paged attention, imported only if that backend is selected.

One program computes ``BLOCK_M`` rows: neighbouring queries of one request, with all query heads of
one KV head. It iterates over their visible keys, ``BLOCK_N`` at a time, with an online softmax
(Milakov and Gimelshein 2018), and looks up each key's page in the block table::

    rows of a program        2 heads per kv head, BLOCK_M = 4
    q5 h0 | x x x x x x . .
    q5 h1 | x x x x x x . .     causal: up to its own position
    q6 h0 | x x x x x x x .
    q6 h1 | x x x x x x x .

If there are few requests, their sequences are split into segments, one program each;
:func:`merge_segments` merges them (flash decoding). Lengths, table widths and windows are runtime
arguments, so that sequences can grow without recompilation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# True if kernels run as Python; TRITON_INTERPRET decides this when they are defined.
IS_INTERPRETED = bool(triton.knobs.runtime.interpret)


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return the operand type of products: the given dtype itself.

    Triton's interpreter multiplies the bits of bfloat16 as integers, so float32, which can
    represent the same numbers, is used there.
    """
    if dtype == torch.bfloat16 and IS_INTERPRETED:
        return tl.float32
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[
        dtype
    ]


# Per-step numbers, and tensors at any offset of a packed one: kernels are not specialized for them.
_UNSPECIALIZED = [
    "starts_ptr",
    "seq_lens_ptr",
    "table_ptr",
    "table_stride",
    "num_reqs",
    "num_segments",
    "window",
    "is_causal",
    "first_chunk",
    "num_distances",
    "bias_ptr",
]


@triton.jit
def _find_request(
    starts_ptr: tl.tensor, num_reqs: tl.tensor, program: tl.tensor, BLOCK_Q: tl.constexpr
) -> tl.tensor:
    """Find the request of a program: the last whose first program is not after it."""
    low = 0
    high = num_reqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // BLOCK_Q + middle <= program:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def paged_attention(
    query_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    output_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    table_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    num_reqs: tl.tensor,
    num_segments: tl.tensor,
    window: tl.tensor,
    is_causal: tl.tensor,
    first_chunk: tl.tensor,
    num_distances: tl.tensor,
    CHUNKS_PER_PAGE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
) -> None:
    """Attend with the queries of a step over paged keys and values.

    The grid is ``(tokens // BLOCK_Q + requests, kv heads, segments)``, where ``BLOCK_Q`` is
    ``BLOCK_M`` over the heads per kv head. With one segment the output is written; with several,
    their sums ``(tokens, heads, segments, HEAD_DIM)``, and their largest scores and sums of
    weights ``(tokens, heads, segments, 2)``.

    Args:
        query_ptr: ``(tokens, heads, HEAD_DIM)``, tokens ``query_stride`` apart.
        chunks_ptr: all chunks of the group's pages; the layer's keys are ``first_chunk`` of a page.
        bias_ptr: ``(heads, num_distances)`` float32; no bias with 0 distances.
        scale: factor on scores, times ``log2(e)`` unless they are capped: weights are powers of 2.
        window: maximum number of positions that a query sees.
        DOT_DTYPE: operand type of products.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    LOG2_E: tl.constexpr = 1.4426950408889634
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    segment = tl.program_id(2)
    request = _find_request(starts_ptr, num_reqs, program, BLOCK_Q)
    start = tl.load(starts_ptr + request)
    query_len = tl.load(starts_ptr + request + 1) - start
    first_query = (program - (start // BLOCK_Q + request)) * BLOCK_Q
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + request)

    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, PADDED_DIM)
    in_dim = dim < HEAD_DIM
    query = first_query + row // GROUP
    is_row = (row // GROUP < BLOCK_Q) & (query < query_len)
    head = kv_head * GROUP + row % GROUP
    token = (start + query).to(tl.int64)
    # Without causality every query sees all keys, as if it were the last.
    position = tl.where(is_causal != 0, seq_len - query_len + query, seq_len - 1)
    first_seen = tl.maximum(position - window + 1, 0)

    queries = tl.load(
        query_ptr + token[:, None] * query_stride + head[:, None] * HEAD_DIM + dim[None, :],
        mask=is_row[:, None] & in_dim[None, :],
        other=0.0,
    ).to(DOT_DTYPE)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)

    # Keys of all queries of the program; rows past the request's end add none.
    last_query = tl.minimum(first_query + BLOCK_Q, query_len) - 1
    last = tl.where(is_causal != 0, seq_len - query_len + last_query, seq_len - 1)
    begin = tl.min(first_seen) // BLOCK_N * BLOCK_N
    num_tiles = (last - begin) // BLOCK_N + 1
    tiles = (num_tiles + num_segments - 1) // num_segments
    begin += segment * tiles * BLOCK_N
    end = tl.minimum(begin + tiles * BLOCK_N, last + 1)
    first_of_all = tl.min(first_seen)
    KV_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    for tile in range(begin, end, BLOCK_N):
        key = tile + tl.arange(0, BLOCK_N)
        is_key = (key >= first_of_all) & (key < end)
        page = tl.load(
            table_ptr + request * table_stride + key // BLOCK_SIZE, mask=is_key, other=0
        ).to(tl.int64)
        slot = (page * CHUNKS_PER_PAGE + first_chunk) * BLOCK_SIZE + key % BLOCK_SIZE
        offset = slot * KV_STRIDE + kv_head * HEAD_DIM
        is_read = is_key[:, None] & in_dim[None, :]
        keys = tl.load(chunks_ptr + offset[:, None] + dim[None, :], mask=is_read, other=0.0).to(
            DOT_DTYPE
        )
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if IS_CAPPED:
            # tanh(x) is 1 - 2 / (exp(2 x) + 1).
            tanh = 1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / softcap)) + 1.0)
            scores = tanh * (softcap * LOG2_E)
        if num_distances > 0:
            distance = tl.minimum(
                tl.maximum(position[:, None] - key[None, :], 0), num_distances - 1
            )
            scores += LOG2_E * tl.load(
                bias_ptr + head[:, None] * num_distances + distance, mask=is_row[:, None], other=0.0
            )
        seen = (key[None, :] >= first_seen[:, None]) & (key[None, :] <= position[:, None])
        scores = tl.where(seen & is_key[None, :], scores, float("-inf"))
        now_largest = tl.maximum(largest, tl.max(scores, 1))
        shift = tl.where(now_largest == float("-inf"), 0.0, now_largest)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(largest - shift)
        values = tl.load(
            chunks_ptr + (offset + BLOCK_SIZE * KV_STRIDE)[:, None] + dim[None, :],
            mask=is_read,
            other=0.0,
        )
        # Rounded to the values' type, even if the product uses a wider type.
        rounded = weights.to(values.dtype).to(DOT_DTYPE)
        total = total * rescale[:, None] + tl.dot(
            rounded, values.to(DOT_DTYPE), input_precision="ieee"
        )
        weight = weight * rescale + tl.sum(weights, 1)
        largest = now_largest

    is_written = is_row[:, None] & in_dim[None, :]
    output_row = token * NUM_HEADS + head
    if num_segments == 1:
        # Rows without visible keys (of an encoder without output) are zeros.
        attended = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
        tl.store(
            output_ptr + output_row[:, None] * HEAD_DIM + dim[None, :],
            attended.to(output_ptr.dtype.element_ty),
            mask=is_written,
        )
    else:
        part = output_row * num_segments + segment
        tl.store(partial_ptr + part[:, None] * HEAD_DIM + dim[None, :], total, mask=is_written)
        tl.store(stats_ptr + part * 2, largest, mask=is_row)
        tl.store(stats_ptr + part * 2 + 1, weight, mask=is_row)


@triton.jit(do_not_specialize=["num_segments"])
def merge_segments(
    partial_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    output_ptr: tl.tensor,
    num_segments: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MAX_SEGMENTS: tl.constexpr,
) -> None:
    """Merge the partial sums of each row's segments; one program per token and head."""
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, PADDED_DIM)
    segment = tl.arange(0, MAX_SEGMENTS)
    is_segment = segment < num_segments
    part = row * num_segments + segment
    largest = tl.load(stats_ptr + part * 2, mask=is_segment, other=float("-inf"))
    weight = tl.load(stats_ptr + part * 2 + 1, mask=is_segment, other=0.0)
    overall = tl.max(largest, 0)
    share = tl.exp2(largest - tl.where(overall == float("-inf"), 0.0, overall))
    totals = tl.load(
        partial_ptr + part[:, None] * HEAD_DIM + dim[None, :],
        mask=is_segment[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    attended = tl.sum(totals * share[:, None], 0)
    sum_of_weights = tl.sum(weight * share, 0)
    attended = attended / tl.where(sum_of_weights == 0.0, 1.0, sum_of_weights)
    tl.store(
        output_ptr + row * HEAD_DIM + dim,
        attended.to(output_ptr.dtype.element_ty),
        mask=dim < HEAD_DIM,
    )
