"""Metadata of one step for the layers of one KV-cache group, and the backend interface.

A token sees a range of positions. Causality ends it at the token's own position; tokens of an image
may see up to the end of the image. It begins at position 0, or later with a window::

    position        0 1 2 3 4 5 6 7 8
    full            x x x x x x x q        first visible: 0
    window of 3     . . . . . x x q        itself included
    in an image     . x x q x x . . .      of positions 2 to 5: visible end 6

Products are turned into scores by a scale, a cap and a bias by distance. A soft cap bounds scores
by ``softcap * tanh(score / softcap)`` before the mask and the softmax; torch's fused attention does
not support it. Bucketed relative positions and ALiBi add a bias that depends on the distance from
the query back to the key. It is a table with one row per head and one column per distance, starting
with 0 for the query's own position. Distances beyond the table use its last column::

    bias[h]       b0 b1 b2 b3

    key           0  1  2  3  4  5  6
    query 5      b3 b3 b3 b2 b1 b0  .
    query 6      b3 b3 b3 b3 b2 b1 b0

So pages of keys need no pages of biases, and decodes read the same table as prefills.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from engine.attention.packed_layout import PackedLayout
from engine.resources.device import upload_tensor
from prefix_cache import LayerKVCache


def first_visible(positions: Tensor, window: int | None) -> Tensor:
    """Return the first position that tokens see, in the shape and type of their positions.

    Args:
        window: maximum number of positions a token sees, including itself; None: unlimited.
    """
    if window is None:
        return torch.zeros_like(positions)
    return (positions - window + 1).clamp_(min=0)


def write_kv(key: Tensor, value: Tensor, kv_cache: LayerKVCache, row_mapping: Tensor) -> None:
    """Store this step's keys and values ``(num_tokens, num_kv_heads, head_dim)``."""
    kv_cache.keys.index_copy_(0, row_mapping, key)
    kv_cache.values.index_copy_(0, row_mapping, value)


def layer_chunks(kv_cache: LayerKVCache) -> tuple[Tensor, Tensor]:
    """Return a layer's key chunks and value chunks, both indexed by ``page * chunks_per_page``.

    The views ``(chunks, block_size * num_kv_heads * head_dim)`` include the layer's offset, so one
    index serves all layers of the group.
    """
    chunks = kv_cache.chunks.flatten(1)
    first = 2 * kv_cache.layer_index
    return chunks[first:], chunks[first + 1 :]


def visible_blocks(
    block_table: Tensor, first_visible: Tensor, seq_lens: Tensor, block_size: int
) -> Tensor:
    """Reduce a block table to visible blocks, so that no other page is ever read.

    Blocks before a window may belong to another request by now, and the null block has arbitrary
    contents: weights of 0 are not enough, as 0 * NaN is NaN. Short rows repeat their last block::

        table      | a b c d e 0 0 |  visible from block 2 on   ->   | c d e |
                   | f g h 0 0 0 0 |                from 1 on        | g h h |

    Args:
        block_table: ``(num_reqs, blocks)``.
        first_visible: ``(num_reqs,)`` on the CPU: the first visible position.
        seq_lens: ``(num_reqs,)`` on the CPU.

    Returns:
        ``(num_reqs, maximum number of visible blocks)``.
    """
    first = first_visible.long() // block_size
    last = (seq_lens.long() - 1) // block_size
    columns = first[:, None] + torch.arange(int((last - first).max()) + 1)
    columns = torch.minimum(columns, last[:, None])
    return block_table.gather(1, upload_tensor(columns, block_table.device))


class Scoring(NamedTuple):
    """Mapping from products of queries and keys to scores before the softmax.

    Attributes:
        softcap: scores become ``softcap * tanh(score / softcap)``; None: no cap.
        bias: ``(num_heads, distances)`` float32, added to scores last, by the distance from the
            query back to the key; causal attention only; see the module docstring.
    """

    scale: float
    softcap: float | None = None
    bias: Tensor | None = None

    @property
    def only_scales(self) -> bool:
        """True if there is neither a soft cap nor a bias."""
        return self.softcap is None and self.bias is None


def bias_at(bias: Tensor, distances: Tensor) -> Tensor:
    """Return the bias of every head at integer distances of any shape, ``(num_heads, *shape)``.

    Negative distances (keys after their query, which are masked anyway) get an arbitrary bias.
    """
    return bias[:, distances.clamp(0, bias.shape[1] - 1)]


def tile_bias(bias: Tensor, num_queries: int, num_keys: int) -> Tensor:
    """Return the bias of neighbouring queries, the last of which is at the last key's position.

    One row holds all distances of the tile; the biases of each query are a slice of it::

        distance      6 5 4 3 2 1 0 -1      7 keys, 2 queries
        last query  [ 6 5 4 3 2 1 0 ]
        first         [ 5 4 3 2 1 0 -1 ]

    Returns:
        ``(num_heads, num_queries, num_keys)``.
    """
    distances = torch.arange(num_keys - 1, -num_queries, -1, device=bias.device)
    return bias_at(bias, distances).unfold(1, num_keys, 1).flip(1)


def soft_capped_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """Attend in at least float32, with all scores in memory: callers cut queries into tiles.

    Args:
        query: ``(batch, queries, num_heads, head_dim)``, also the shape of the output.
        keys: ``(batch, keys, num_kv_heads, head_dim)``; grouped heads are not repeated.
        mask: added to the capped scores; broadcast to ``(batch, num_kv_heads, num_heads per
            num_kv_heads, queries, keys)``. None: every query sees every key.
        scale: factor on the scores before they are capped.
    """
    exact = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(exact).unflatten(2, (keys.shape[2], -1))
    scores = torch.einsum("bqhgd,bkhd->bhgqk", grouped, keys.to(exact))
    scores.mul_(scale / softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores.add_(mask)
    attended = torch.einsum("bhgqk,bkhd->bqhgd", scores.softmax(-1), values.to(exact))
    return attended.flatten(2, 3).to(query.dtype)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Metadata of one step for the attention layers of one KV-cache group.

    Requests are ordered by their number of tokens, decodes (``query_len == 1``) first, so that
    backends can split decodes from prefills without sorting::

        tokens    | d0 | d1 | d2 | p0 p0 p0 | p1 p1 p1 p1 p1 |
        query_start_loc 0    1    2    3          6               11
                  └ num_decodes=3 ┘

    Cross-attention uses the same fields, with ``causal=False``. The sequences are then encoder
    outputs, which contain no query token. Each query sees the whole sequence of its request; the
    step stores the encoder tokens of requests whose encoder ran in this step. Queries that form
    the sequence themselves, as in an encoder's self-attention, are a special case.

    Attributes:
        query_start_loc: ``(num_reqs + 1,)`` int32 on the CPU: first token of each request.
        seq_lens: ``(num_reqs,)`` int32 on the CPU: computed tokens plus this step's. Without
            causality: the length of the sequence attended to; a request with 0 gets zeros.
        block_table: ``(num_reqs, max_blocks)`` int32 on the device: logical to physical block;
            entries past a request's last block are 0, the null block. Entries of blocks that no
            query token of the request can see may be stale: their pages must not be read.
        row_mapping: ``(num_written,)`` int64 on the device: for each key that this step stores,
            its row in layer 0, see :mod:`prefix_cache.stores.paged_memory`. One per query token,
            or, without causality, one per encoder output of this step, possibly none.
        num_decodes: number of leading requests with exactly one query token.
        window: maximum number of positions a token sees, including itself; None: unlimited.
        causal: True if query tokens end their sequence and see no later token; else they see all.
        visible_ends: ``(num_tokens,)`` int32 on the CPU: end of the positions that a token sees,
            possibly after the token, but within the step. None: it sees nothing after itself.
        on_device: ``query_start_loc`` and ``seq_lens`` on the device, for kernels that read them;
            None if the backend does not need them.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    row_mapping: Tensor
    num_decodes: int
    block_size: int
    window: int | None = None
    causal: bool = True
    visible_ends: Tensor | None = None
    on_device: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        if not self.causal and self.window is not None:
            raise ValueError(f"without causality there are no windows, got window={self.window}")

    @property
    def num_reqs(self) -> int:
        """Number of requests in the step."""
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        """Number of query tokens in the step, over all requests."""
        return int(self.query_start_loc[-1])


@dataclass(frozen=True, slots=True)
class StateMetadata:
    """Metadata of one step for the recurrent layers of one KV-cache group.

    Requests are ordered as in :class:`AttentionMetadata`.

    Attributes:
        layout: layout of the step's tokens, shared by all groups.
        read_pages: ``(num_reqs,)`` int64 on the device: page of the state to continue, or 0.
        write_pages: ``(num_reqs,)`` int64 on the device: page for the state after the request's
            last token of this step; may equal the read page.
        has_state: ``(num_reqs,)`` booleans on the device; False: the request begins with zeros.
            None: all requests continue from the states in their read pages.
    """

    layout: PackedLayout
    read_pages: Tensor
    write_pages: Tensor
    has_state: Tensor | None


class LayerCall(NamedTuple):
    """Arguments of one layer's attention in one step.

    Attributes:
        query: ``(num_tokens, num_heads, head_dim)``.
        key: ``(num_written, num_kv_heads, head_dim)``; not repeated for grouped heads.
        kv_cache: this layer's views; rows of ``metadata.row_mapping`` are overwritten.
        metadata: the object that was passed to ``begin_step``.
        scoring: mapping from this layer's products to scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    kv_cache: LayerKVCache
    metadata: AttentionMetadata
    scoring: Scoring


class AttentionBackend(ABC):
    """Attention of packed queries over paged keys and values.

    A backend holds no request state. ``begin_step`` is called once per step and group before the
    first layer and builds what all layers share (masks, gather indices); ``forward`` is called
    once per layer.
    """

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def check_support(cls, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
        """Raise a ``ValueError`` that states the requirements if this combination cannot run."""

    @abstractmethod
    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Prepare data shared by all layers of this step, valid until the next call."""

    @abstractmethod
    def forward(self, call: LayerCall) -> Tensor:
        """Write this step's keys and values to their rows, then attend.

        Token i of a request with ``q`` query tokens and a sequence length of ``s`` after this step
        is at position ``s - q + i``. It sees positions ``0 .. s - q + i``, or the last
        ``metadata.window`` of them, and later ones before its end in ``metadata.visible_ends``;
        without ``metadata.causal`` it sees ``0 .. s - 1``.

        Returns:
            ``(num_tokens, num_heads, head_dim)``.
        """
