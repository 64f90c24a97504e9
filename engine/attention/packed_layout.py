"""Index tensors for the packed tokens of a step, as recurrent layers need them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.resources.device import upload_tensor

_MAX_CHUNK = 64

_IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HistoryRows:
    """Rows of a table in which each request's history precedes its tokens::

        request 0          request 1
        h0 h0 h0 t0 t0     h1 h1 h1 t1 t1 t1 t1         history = 3
                 └───┘              └─────────┘         tokens
              └──────┘                 └──────┘         next history: the last three

    Attributes:
        tokens: ``(num_tokens,)`` row of each token.
        histories: ``(num_reqs * history,)`` rows before the request's tokens.
        next_histories: ``(num_reqs * history,)`` rows before the request's next token.
    """

    tokens: Tensor
    histories: Tensor
    next_histories: Tensor


@dataclass(frozen=True, slots=True)
class TimeOrder:
    """Items (tokens, or chunks of tokens) of several sequences, ordered by time::

        sequence 0   a0 a1 a2          batch 0   c0 a0 b0     longest first, so that sequences
        sequence 1   b0                batch 1   c1 a1        which continue are the leading rows
        sequence 2   c0 c1 c2 c3       batch 2   c2 a2
                                       batch 3   c3

    This is the order of torch's ``PackedSequence``: a recurrence processes one batch at a time.

    Attributes:
        sequences: ``(num_sequences,)`` sequences, longest first.
        items: ``(num_items,)`` items, by time and then in the order of ``sequences``.
        batch_sizes: number of unfinished sequences at each time.
    """

    sequences: Tensor
    items: Tensor
    batch_sizes: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Tensor, device: torch.device) -> TimeOrder:
        """Order sequences by their numbers of items, ``(num_sequences,)`` on the CPU."""
        sequences = np.argsort(-lengths.numpy(), kind="stable")
        ranks = np.empty_like(sequences)
        ranks[sequences] = np.arange(len(lengths))
        owners, times = _owners_and_times(lengths.numpy())
        items = np.argsort(times * len(lengths) + ranks[owners])
        batch_sizes = tuple(np.bincount(times).tolist())
        return cls(_upload(device, sequences), _upload(device, items), batch_sizes)

    def batches(self) -> Iterator[slice]:
        """Yield the batches as ranges of :attr:`items`, ordered by time."""
        start = 0
        for size in self.batch_sizes:
            yield slice(start, start + size)
            start += size


@dataclass(frozen=True, slots=True)
class Chunks:
    """Sequences cut into chunks of one size; only the last chunk of a sequence may be partial.

    Attributes:
        slots: ``(num_tokens,)`` index of each token in ``(count * size)``.
        order: order of the chunks in which states are propagated.
    """

    size: int
    count: int
    slots: Tensor
    order: TimeOrder

    @classmethod
    def of(cls, lengths: Tensor, device: torch.device) -> Chunks:
        """Cut sequences with these numbers of tokens, ``(num_sequences,)`` on the CPU."""
        size = min(_MAX_CHUNK, int(lengths.max()))
        counts = (lengths.numpy() + (size - 1)) // size
        owners, times = _owners_and_times(lengths.numpy())
        firsts = (counts.cumsum() - counts) * size
        slots, order = firsts[owners] + times, TimeOrder.of(torch.from_numpy(counts), device)
        return cls(size, int(counts.sum()), _upload(device, slots), order)

    def pad(self, tokens: Tensor) -> Tensor:
        """Pad ``(num_tokens, ...)`` to ``(count, size, ...)`` with zeros in partial chunks."""
        padded = tokens.new_zeros(self.count * self.size, *tokens.shape[1:])
        return padded.index_copy_(0, self.slots, tokens).unflatten(0, (self.count, self.size))


class PackedLayout:
    """Index tensors for the packed tokens of a step, shared by all layers and built lazily.

    Args:
        query_start_loc: ``(num_reqs + 1,)`` integers on the CPU: first token of each request;
            every request has at least one token.
        num_decodes: number of leading requests with exactly one token.
    """

    def __init__(self, query_start_loc: Tensor, num_decodes: int, device: torch.device) -> None:
        self.num_decodes = num_decodes
        self.device = device
        self._history_rows: dict[int, HistoryRows] = {}
        self._starts = query_start_loc.long()
        self._lengths = self._starts.diff()

    @property
    def num_reqs(self) -> int:
        """Number of requests in the step."""
        return self._lengths.shape[0]

    def history_rows(self, history: int) -> HistoryRows:
        """Return rows for a convolution over all requests that sees ``history`` earlier tokens."""
        if history not in self._history_rows:
            starts = self._starts.numpy()
            owners, _ = _owners_and_times(self._lengths.numpy())
            tokens = np.arange(len(owners)) + (owners + 1) * history
            columns = np.arange(history)
            shifts = np.arange(self.num_reqs) * history
            histories = (starts[:-1] + shifts)[:, None] + columns
            next_histories = (starts[1:] + shifts)[:, None] + columns
            rows = (tokens, histories.reshape(-1), next_histories.reshape(-1))
            result = HistoryRows(*(_upload(self.device, indices) for indices in rows))
            self._history_rows[history] = result
        return self._history_rows[history]

    @cached_property
    def time_order(self) -> TimeOrder:
        """Order of all tokens by their index within their request in this step."""
        return TimeOrder.of(self._lengths, self.device)

    @cached_property
    def prefill_chunks(self) -> Chunks:
        """Chunks of the requests after the first ``num_decodes``; there must be at least one."""
        return Chunks.of(self._lengths[self.num_decodes :], self.device)


def _owners_and_times(lengths: _IntArray) -> tuple[_IntArray, _IntArray]:
    """Return the sequence of each item, and its index in that sequence."""
    owners = np.arange(len(lengths)).repeat(lengths)
    firsts = lengths.cumsum() - lengths
    return owners, np.arange(len(owners)) - firsts[owners]


def _upload(device: torch.device, indices: _IntArray) -> Tensor:
    return upload_tensor(torch.from_numpy(indices), device)
