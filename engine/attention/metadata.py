"""What one step gives the layers of one KV-cache group: those that attend, and recurrent ones.

From above it is causality that ends what a token sees, its own position being the last; tokens of
an image may see up to its end. From below it is one position, which windows move up::

    position        0 1 2 3 4 5 6 7 8
    full            x x x x x x x q        first visible: 0
    window of 3     . . . . . x x q        itself included
    in an image     . x x q x x . . .      of positions 2 to 5: visible end 6

Products become scores: scaled, capped, and with a bias by distance. A soft cap bounds scores by
``softcap * tanh(score / softcap)`` before the mask and the softmax, which torch's fused attention
does not know. Relative positions in buckets, and ALiBi, add a bias by how far a key lies behind. It
is a table of one row per head and one column per distance, the query's own position being distance
0, and ends where the distance stops to matter: longer ones take its last column::

    bias[h]       b0 b1 b2 b3

    key           0  1  2  3  4  5  6
    query 5      b3 b3 b3 b2 b1 b0  .
    query 6      b3 b3 b3 b3 b2 b1 b0

So a page of keys needs no page of biases, and a decode reads what a prefill did."""

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
    """The first position that tokens see, in the shape and type of their positions.

    Args:
        window: how many positions a token sees at most, itself included; None: all before it.
    """
    if window is None:
        return torch.zeros_like(positions)
    return (positions - window + 1).clamp_(min=0)


def write_kv(key: Tensor, value: Tensor, kv_cache: LayerKVCache, row_mapping: Tensor) -> None:
    """Store this step's keys and values ``(num_tokens, num_kv_heads, head_dim)``."""
    kv_cache.keys.index_copy_(0, row_mapping, key)
    kv_cache.values.index_copy_(0, row_mapping, value)


def layer_chunks(kv_cache: LayerKVCache) -> tuple[Tensor, Tensor]:
    """One layer's key chunks and value chunks, both indexed by ``page * chunks_per_page``.

    The shift of the layer is in the views ``(chunks, block_size * num_kv_heads * head_dim)``, so
    that one index serves all layers of the group.
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

    Returns:
        ``(num_reqs, most visible blocks)``.
    """
    first = first_visible.long() // block_size
    last = (seq_lens.long() - 1) // block_size
    columns = first[:, None] + torch.arange(int((last - first).max()) + 1)
    columns = torch.minimum(columns, last[:, None])
    return block_table.gather(1, upload_tensor(columns, block_table.device))


class Scoring(NamedTuple):
    """What a layer does to the products of its queries and keys before the softmax.

    Attributes:
        softcap: scores become ``softcap * tanh(score / softcap)``; None leaves them.
        bias: ``(num_heads, distances)`` float32, added to scores last, by how far behind its query
            a key lies; causal attention only; see the module's picture.
    """

    scale: float
    softcap: float | None = None
    bias: Tensor | None = None

    @property
    def only_scales(self) -> bool:
        """Whether there is neither a soft cap nor a bias."""
        return self.softcap is None and self.bias is None


def bias_at(bias: Tensor, distances: Tensor) -> Tensor:
    """The bias of every head at integer distances of any shape, ``(num_heads, *shape)``.

    Keys behind their query, whose distance is negative, are hidden anyway and get any number.
    """
    return bias[:, distances.clamp(0, bias.shape[1] - 1)]


def bias_of_tile(bias: Tensor, num_queries: int, num_keys: int) -> Tensor:
    """Of neighbouring queries, the last of which has the position of the last key.

    One row holds all distances of the tile, and each query's biases are a stretch of it::

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
    """Attend in float32 at least; all scores exist at once, so callers cut queries into tiles.

    Args:
        query: ``(batch, queries, num_heads, head_dim)``, the shape of what is returned.
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
    """The metadata that one step gives the attention layers of one KV-cache group.

    Requests are ordered by their number of tokens, the decodes (``query_len == 1``) first, so
    that a backend may treat the kinds apart without sorting::

        tokens    | d0 | d1 | d2 | p0 p0 p0 | p1 p1 p1 p1 p1 |
        query_start_loc 0    1    2    3          6               11
                  └ num_decodes=3 ┘

    Cross-attention has the same fields, with ``causal=False``: the sequences are then the
    encoder's, which no query token belongs to. Each sees all of its request's; what is written
    are the encoder's tokens of those requests whose encoder ran in this step. Queries that are
    the sequence themselves, as in an encoder's own attention, are a case of this.

    Attributes:
        query_start_loc: ``(num_reqs + 1,)`` int32 on the CPU: where each request's tokens start.
        seq_lens: ``(num_reqs,)`` int32 on the CPU: computed tokens plus this step's. Without
            causality: the length of what is attended to; a request with 0 gets zeros.
        block_table: ``(num_reqs, max_blocks)`` int32 on the device: logical to physical block;
            entries past a request's last block are 0, the null block. Those of blocks that no
            query token of the request can see may be stale: their pages are not to be read.
        row_mapping: ``(num_written,)`` int64 on the device: the row of layer 0's key, see
            :mod:`prefix_cache.stores.paged_memory`, of each key that this step stores: one per
            query token, or, without causality, one per token that the encoder gave in this step,
            maybe none.
        num_decodes: how many of the leading requests have exactly one query token.
        window: how many positions a token sees at most, itself included; None: all before it.
        causal: query tokens end their sequence and see none behind; False: they see all of it.
        visible_ends: ``(num_tokens,)`` int32 on the CPU: where what a token sees ends, which may
            lie behind it, but within the step. None: every token is the last that it sees.
        on_device: ``query_start_loc`` and ``seq_lens`` on the device, for kernels that look them
            up; None if the backend does not ask for them.
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
        """Requests in the step."""
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        """Query tokens in the step, over all requests."""
        return int(self.query_start_loc[-1])


@dataclass(frozen=True, slots=True)
class StateMetadata:
    """The metadata that one step gives the recurrent layers of one KV-cache group.

    Requests are ordered as in :class:`AttentionMetadata`.

    Attributes:
        layout: of the step's tokens; groups share one.
        read_pages: ``(num_reqs,)`` int64 on the device: the page of the state to continue, or 0.
        write_pages: ``(num_reqs,)`` int64 on the device: the page that takes the state after the
            request's last token of this step; may be the one that is read.
        has_state: ``(num_reqs,)`` booleans on the device; False: the request begins with zeros.
            None: all go on from the states that are read.
    """

    layout: PackedLayout
    read_pages: Tensor
    write_pages: Tensor
    has_state: Tensor | None


class LayerCall(NamedTuple):
    """One layer's attention in one step.

    Attributes:
        query: ``(num_tokens, num_heads, head_dim)``.
        key: ``(num_written, num_kv_heads, head_dim)``; not repeated for grouped heads.
        kv_cache: this layer's views; rows of ``metadata.row_mapping`` are overwritten.
        metadata: the same object that ``begin_step`` got.
        scoring: how this layer's products become scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    kv_cache: LayerKVCache
    metadata: AttentionMetadata
    scoring: Scoring


class AttentionBackend(ABC):
    """Computes attention of packed queries over paged keys and values.

    A backend holds no request state: everything comes with the call. ``begin_step`` is called
    once per step and group before the first layer, so that what all layers share (masks, gather
    indices) is made once; ``forward`` once per layer.
    """

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def check_support(cls, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
        """Raise ``ValueError`` that says what is needed if this combination cannot run."""

    @abstractmethod
    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Make what every layer of this step shares. Valid until the next call."""

    @abstractmethod
    def forward(self, call: LayerCall) -> Tensor:
        """Write this step's keys and values to their rows, then attend.

        Token i of a request whose sequence is ``s`` long after this step and that has ``q``
        query tokens sits at position ``s - q + i`` and sees positions ``0 .. s - q + i``, or of
        them the last ``metadata.window``, and those behind it before its end of
        ``metadata.visible_ends``; without ``metadata.causal`` it sees ``0 .. s - 1``.

        Returns:
            ``(num_tokens, num_heads, head_dim)``.
        """
