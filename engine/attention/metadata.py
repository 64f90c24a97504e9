"""What one step tells the layers of one KV-cache group: those that attend, and recurrent ones."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["AttentionMetadata", "StateMetadata"]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What one step tells the attention layers of one KV-cache group.

    Requests are ordered by their number of tokens, the decodes (``query_len == 1``) first, so
    that a backend may treat the kinds apart without sorting::

        tokens    | d0 | d1 | d2 | p0 p0 p0 | p1 p1 p1 p1 p1 |
        query_start_loc 0    1    2    3          6               11
                  └ num_decodes=3 ┘

    Cross-attention is told the same way, with ``causal=False``: the sequences are then the
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
        slot_mapping: ``(num_written,)`` int64 on the device: ``block_id * block_size + offset``
            of each key that this step stores: one per query token, or, without causality, one per
            token that the encoder gave in this step, maybe none.
        row_mapping: ``(num_written,)`` int64 on the device: the row of layer 0's key; see
            :mod:`prefix_cache.stores.paged_memory`.
        num_decodes: how many of the leading requests have exactly one query token.
        block_size: tokens per block.
        window: how many positions a token sees at most, itself included; None: all before it.
        chunk_size: tokens see their own chunk of so many positions only; None: no chunks.
        causal: query tokens end their sequence and see none behind; False: they see all of it.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    row_mapping: Tensor
    num_decodes: int
    block_size: int
    window: int | None = None
    chunk_size: int | None = None
    causal: bool = True

    def __post_init__(self) -> None:
        if not self.causal and (self.window is not None or self.chunk_size is not None):
            raise ValueError(
                f"without causality there are no windows or chunks, got window={self.window}, "
                f"chunk_size={self.chunk_size}"
            )

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
    """What one step tells the recurrent layers of one KV-cache group.

    Requests are ordered as in :class:`AttentionMetadata`.

    Attributes:
        query_start_loc: ``(num_reqs + 1,)`` int32 on the CPU: where each request's tokens start.
        num_decodes: how many of the leading requests have exactly one token.
        read_pages: ``(num_reqs,)`` int64 on the device: the page of the state to continue, or 0.
        write_pages: ``(num_reqs,)`` int64 on the device: the page that takes the state after the
            request's last token of this step; may be the one that is read.
        has_state: ``(num_reqs,)`` booleans on the device; False: the request begins with zeros.
            None: all go on from the states that are read.
    """

    query_start_loc: Tensor
    num_decodes: int
    read_pages: Tensor
    write_pages: Tensor
    has_state: Tensor | None

    @property
    def num_reqs(self) -> int:
        """Requests in the step."""
        return self.read_pages.shape[0]
