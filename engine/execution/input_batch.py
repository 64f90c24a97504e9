"""The persistent tables of running requests, and how a step's inputs are cut from them.

Two requests-by-something tables outlive the steps::

    token ids      (max_num_seqs, max_model_len)       block table    (max_num_seqs, K)
    row 0 | t t t t . . . . |                          row 0 | 1 2 0 0 |   0 = null block
    row 1 | t t . . . . . . |                          row 1 | 3 7 0 0 |
    row 2 | t t t t t t t t |                          row 2 | 4 5 6 8 |

A step schedules some tokens of some rows. Everything a model needs is then an indexed read,
without a loop over tokens::

    request_indices      row of each token                 [0, 0, 0, 1, 1, 2, ...]
    positions            num_computed[row] + 0, 1, 2, ...  [0, 1, 2, 0, 1, 0, ...]
    token_indices        row * max_model_len + position    into the flattened token table
    block_table_indices  row * K + position // block_size  into the flattened block table
    slot_mapping         block_number * block_size + position % block_size
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["GroupInputs", "InputBatch", "IntArray", "StepInputs"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """What one KV-cache group adds to a step's inputs.

    Attributes:
        block_table: ``(num_reqs, K)`` int32 of the scheduled requests, in the step's order; cut
            to the longest of them.
        block_table_indices: ``(num_tokens,)`` into the flattened persistent table; of
            cross-attention groups per encoder token that this step brings.
        slot_mapping: likewise, where each token's entry is written.
    """

    block_table: npt.NDArray[np.int32]
    block_table_indices: IntArray
    slot_mapping: IntArray


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's inputs, on the host.

    Attributes:
        request_indices: ``(num_tokens,)`` table row of each token.
        positions: ``(num_tokens,)`` place of each token in its own sequence.
        token_indices: ``(num_tokens,)`` into the flattened token table.
        token_ids: ``(num_tokens,)`` input ids.
        query_start_loc: ``(num_reqs + 1,)`` where each request's tokens start.
        seq_lens: ``(num_reqs,)`` computed tokens plus this step's.
        num_computed_tokens: ``(num_reqs,)``.
        encoder_lens: ``(num_reqs,)`` encoder tokens that each request's tokens see.
        groups: one entry per KV-cache group.
    """

    request_indices: IntArray
    positions: IntArray
    token_indices: IntArray
    token_ids: IntArray
    query_start_loc: IntArray
    seq_lens: IntArray
    num_computed_tokens: IntArray
    encoder_lens: IntArray
    groups: tuple[GroupInputs, ...]


class InputBatch:
    """Token ids and block tables of the running requests, one row each.

    A row is taken when a request starts to run and given back when it stops; rows never move.

    Args:
        max_num_seqs: rows.
        max_model_len: columns of the token table.
        block_sizes: tokens per block of each KV-cache group.
        max_encoder_lens: longest encoder sequence of each group that is cross-attention.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_sizes: Sequence[int],
        max_encoder_lens: Mapping[int, int] | None = None,
    ) -> None:
        self._block_sizes = tuple(block_sizes)
        self._cross_groups = dict(max_encoder_lens or {})
        # np.zeros leaves untouched pages unbacked, so a long max_model_len costs nothing.
        self._token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int64)
        self._block_tables = tuple(
            np.zeros(
                (max_num_seqs, -(-self._cross_groups.get(group_id, max_model_len) // size)),
                dtype=np.int32,
            )
            for group_id, size in enumerate(self._block_sizes)
        )
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.clear()

    def clear(self) -> None:
        """Give every row back, in whatever state an interrupted call left them."""
        max_num_seqs = len(self._num_tokens)
        for table in self._block_tables:
            table.fill(0)
        self._num_blocks = [[0] * max_num_seqs for _ in self._block_sizes]
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._row_of: dict[str, int] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._row_of

    def add(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Take a row for a request and fill in all tokens known so far.

        Raises:
            ValueError: the request has a row, or all rows are taken.
        """
        if request_id in self._row_of:
            raise ValueError(f"request {request_id!r} already has a row")
        if not self._free_rows:
            raise ValueError(f"all {len(self._row_of)} rows are taken")
        row = self._free_rows.pop()
        self._row_of[request_id] = row
        self._token_ids[row, : len(token_ids)] = token_ids
        self._num_tokens[row] = len(token_ids)

    def remove(self, request_id: str) -> None:
        """Give a request's row back; an id without a row is ignored."""
        row = self._row_of.pop(request_id, None)
        if row is None:
            return
        for table, counts in zip(self._block_tables, self._num_blocks, strict=True):
            table[row, : counts[row]] = 0
            counts[row] = 0
        self._free_rows.append(row)

    def append_token(self, request_id: str, token_id: int) -> None:
        """Write the token that was just sampled behind the others."""
        row = self._row_of[request_id]
        self._token_ids[row, self._num_tokens[row]] = token_id
        self._num_tokens[row] += 1

    def num_blocks(self, request_id: str, group_id: int = 0) -> int:
        """How many blocks of a request the table knows."""
        return self._num_blocks[group_id][self._row_of[request_id]]

    def append_blocks(self, request_id: str, block_ids: Sequence[int], group_id: int = 0) -> None:
        """Write a request's new blocks behind the known ones."""
        row = self._row_of[request_id]
        known = self._num_blocks[group_id][row]
        self._block_tables[group_id][row, known : known + len(block_ids)] = block_ids
        self._num_blocks[group_id][row] = known + len(block_ids)

    def prepare(
        self,
        request_ids: Sequence[str],
        num_computed_tokens: Sequence[int],
        num_scheduled_tokens: Sequence[int],
        encoder_lens: Sequence[int] = (),
        num_arriving: Sequence[int] = (),
    ) -> StepInputs:
        """Cut one step's inputs from the tables.

        Args:
            request_ids: the requests that run, in the order in which their tokens are packed.
            num_computed_tokens: per request, tokens computed before this step.
            num_scheduled_tokens: per request, tokens to run, at least 1.
            encoder_lens: per request, the encoder tokens that it sees; empty if none sees any.
            num_arriving: per request, encoder tokens that come with this step; empty if none do.
        """
        rows = np.array([self._row_of[request_id] for request_id in request_ids], dtype=np.int64)
        computed = np.asarray(num_computed_tokens, dtype=np.int64)
        scheduled = np.asarray(num_scheduled_tokens, dtype=np.int64)

        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int64)
        scheduled.cumsum(out=query_start_loc[1:])
        request_indices = rows.repeat(scheduled)
        # arange over all tokens, less each request's start, plus what it has computed
        positions = np.arange(query_start_loc[-1]) + (computed - query_start_loc[:-1]).repeat(
            scheduled
        )
        token_indices = request_indices * self._token_ids.shape[1] + positions
        seq_lens = computed + scheduled
        encoder = np.asarray(encoder_lens or [0] * len(rows), dtype=np.int64)
        arriving = np.asarray(num_arriving or [0] * len(rows), dtype=np.int64)
        return StepInputs(
            request_indices=request_indices,
            positions=positions,
            token_indices=token_indices,
            token_ids=self._token_ids.reshape(-1)[token_indices],
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            num_computed_tokens=computed,
            encoder_lens=encoder,
            groups=tuple(
                self._prepare_cross_group(group_id, rows, encoder, arriving)
                if group_id in self._cross_groups
                else self._prepare_group(group_id, rows, request_indices, positions, seq_lens)
                for group_id in range(len(self._block_sizes))
            ),
        )

    def _prepare_cross_group(
        self, group_id: int, rows: IntArray, encoder_lens: IntArray, arriving: IntArray
    ) -> GroupInputs:
        """Tables of whole encoder sequences, and slots of those that come with this step."""
        starts = np.cumsum(arriving) - arriving
        positions = np.arange(int(arriving.sum())) - np.repeat(starts, arriving)
        return self._prepare_group(
            group_id, rows, np.repeat(rows, arriving), positions, encoder_lens
        )

    def _prepare_group(
        self,
        group_id: int,
        rows: IntArray,
        request_indices: IntArray,
        positions: IntArray,
        seq_lens: IntArray,
    ) -> GroupInputs:
        table = self._block_tables[group_id]
        block_size = self._block_sizes[group_id]
        block_table_indices = request_indices * table.shape[1] + positions // block_size
        block_numbers = table.reshape(-1)[block_table_indices].astype(np.int64)
        longest = -(-int(seq_lens.max()) // block_size)
        return GroupInputs(
            block_table=table[rows, :longest],
            block_table_indices=block_table_indices,
            slot_mapping=block_numbers * block_size + positions % block_size,
        )
