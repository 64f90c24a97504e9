"""Where the tokens of a step's requests lie, in the forms that recurrent layers want."""

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
    """Rows of a table in which each request's tokens follow what it remembers of earlier ones::

        request 0          request 1
        h0 h0 h0 t0 t0     h1 h1 h1 t1 t1 t1 t1         history = 3
                 └───┘              └─────────┘         tokens
              └──────┘                 └──────┘         next history: the last three

    Attributes:
        tokens: ``(num_tokens,)`` row of each token.
        histories: ``(num_reqs * history,)`` rows of what came before.
        next_histories: ``(num_reqs * history,)`` rows that come before the request's next token.
    """

    tokens: Tensor
    histories: Tensor
    next_histories: Tensor


@dataclass(frozen=True, slots=True)
class TimeOrder:
    """Items (tokens, or chunks of them) of several sequences, reordered by their time::

        sequence 0   a0 a1 a2          batch 0   c0 a0 b0     longest first, so that those which
        sequence 1   b0                batch 1   c1 a1        go on are the leading rows
        sequence 2   c0 c1 c2 c3       batch 2   c2 a2
                                       batch 3   c3

    It is the order of torch's ``PackedSequence``: a recurrence takes one batch at a time.

    Attributes:
        sequences: ``(num_sequences,)`` the sequences, longest first.
        items: ``(num_items,)`` the items, by time and then by that order.
        batch_sizes: how many sequences are still going at each time.
    """

    sequences: Tensor
    items: Tensor
    batch_sizes: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Tensor, device: torch.device) -> TimeOrder:
        """The order of sequences of ``lengths`` ``(num_sequences,)`` (on the CPU) items."""
        sequences = np.argsort(-lengths.numpy(), kind="stable")
        places = np.empty_like(sequences)
        places[sequences] = np.arange(len(lengths))
        owners, times = _owners_and_times(lengths.numpy())
        items = np.argsort(times * len(lengths) + places[owners])
        batch_sizes = tuple(np.bincount(times).tolist())
        return cls(_on(device, sequences), _on(device, items), batch_sizes)

    def batches(self) -> Iterator[slice]:
        """The batches as ranges of :attr:`items`, in the order of time."""
        start = 0
        for size in self.batch_sizes:
            yield slice(start, start + size)
            start += size


@dataclass(frozen=True, slots=True)
class Chunks:
    """Sequences cut into chunks of one size; only the last of a sequence may have room left.

    Attributes:
        slots: ``(num_tokens,)`` each token's place in ``(count * size)``.
        order: of the chunks, in which their states follow from one another.
    """

    size: int
    count: int
    slots: Tensor
    order: TimeOrder

    @classmethod
    def of(cls, lengths: Tensor, device: torch.device) -> Chunks:
        """Cut sequences of ``lengths`` ``(num_sequences,)`` (on the CPU) tokens."""
        size = min(_MAX_CHUNK, int(lengths.max()))
        counts = (lengths.numpy() + (size - 1)) // size
        owners, times = _owners_and_times(lengths.numpy())
        firsts = (counts.cumsum() - counts) * size
        slots, order = firsts[owners] + times, TimeOrder.of(torch.from_numpy(counts), device)
        return cls(size, int(counts.sum()), _on(device, slots), order)

    def pad(self, tokens: Tensor) -> Tensor:
        """``(num_tokens, ...)`` to ``(count, size, ...)``, zeros where a chunk has room left."""
        padded = tokens.new_zeros(self.count * self.size, *tokens.shape[1:])
        return padded.index_copy_(0, self.slots, tokens).view(
            self.count, self.size, *tokens.shape[1:]
        )


class PackedLayout:
    """Where the tokens of a step's requests lie, in the forms that recurrences want.

    One serves all layers of a step; what no layer asks for is not made.

    Args:
        query_start_loc: ``(num_reqs + 1,)`` integers on the CPU: where each request's tokens
            start; every request has a token.
        num_decodes: how many of the leading requests have exactly one token.
    """

    def __init__(self, query_start_loc: Tensor, num_decodes: int, device: torch.device) -> None:
        self.num_decodes = num_decodes
        self.device = device
        self._history_rows: dict[int, HistoryRows] = {}
        self._starts = query_start_loc.long()
        self._lengths = self._starts.diff()

    @property
    def num_reqs(self) -> int:
        """Requests in the step."""
        return self._lengths.shape[0]

    def history_rows(self, history: int) -> HistoryRows:
        """Rows for a convolution over all requests at once, which sees so many earlier tokens."""
        if history not in self._history_rows:
            starts = self._starts.numpy()
            owners, _ = _owners_and_times(self._lengths.numpy())
            tokens = np.arange(len(owners)) + (owners + 1) * history
            one = np.arange(history)
            before = np.arange(self.num_reqs) * history
            histories = (starts[:-1] + before)[:, None] + one
            next_histories = (starts[1:] + before)[:, None] + one
            rows = (tokens, histories.reshape(-1), next_histories.reshape(-1))
            found = HistoryRows(*(_on(self.device, indices) for indices in rows))
            self._history_rows[history] = found
        return self._history_rows[history]

    @cached_property
    def time_order(self) -> TimeOrder:
        """All tokens by their place in this step."""
        return TimeOrder.of(self._lengths, self.device)

    @cached_property
    def prefill_chunks(self) -> Chunks:
        """Chunks of the requests after the first ``num_decodes``, of which there must be one."""
        return Chunks.of(self._lengths[self.num_decodes :], self.device)


def _owners_and_times(lengths: _IntArray) -> tuple[_IntArray, _IntArray]:
    """Each item's sequence, and its place in it."""
    owners = np.arange(len(lengths)).repeat(lengths)
    firsts = lengths.cumsum() - lengths
    return owners, np.arange(len(owners)) - firsts[owners]


def _on(device: torch.device, indices: _IntArray) -> Tensor:
    return upload_tensor(torch.from_numpy(indices), device)
