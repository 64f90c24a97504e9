"""Persistent tables of running requests, and the inputs of a step, which are gathered from them.

Two tables with one row per request persist across steps::

    token ids      (max_num_seqs, max_model_len)       block table    (max_num_seqs, K)
    row 0 | t t t t . . . . |                          row 0 | 1 2 0 0 |   0 = null block
    row 1 | t t . . . . . . |                          row 1 | 3 7 0 0 |
    row 2 | t t t t t t t t |                          row 2 | 4 5 6 8 |

A step schedules some tokens of some rows. Every model input is then an indexed read, without a
loop over tokens::

    request_indices      row of each token                 [0, 0, 0, 1, 1, 2, ...]
    positions            num_computed[row] + 0, 1, 2, ...  [0, 1, 2, 0, 1, 0, ...]
    token_indices        row * max_model_len + position    into the flattened token table
    block_table_indices  row * K + position // block_size  into the flattened block table
    slot_mapping         block_number * block_size + position % block_size"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.layer import AttentionStep
from engine.attention.metadata import AttentionBackend, AttentionMetadata, StateMetadata
from engine.attention.packed_layout import PackedLayout
from engine.models.base import CausalModel
from engine.requests.encoder_input import MultiModalInput
from engine.requests.request import Request
from engine.resources.device import upload
from engine.scheduling.request_queues import EncoderCacheManager
from engine.scheduling.scheduler import ScheduledRequest
from prefix_cache import (
    AttentionSpec,
    CrossAttentionSpec,
    KVCacheManager,
    MambaSpec,
    PagedMemory,
    SlidingWindowSpec,
)

GroupMetadata = AttentionMetadata | StateMetadata | None
"""Metadata of a KV-cache group; None for a group without layers."""


def step_arrays(inputs: StepInputs, memory: PagedMemory) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays that layers read on the device, for :func:`build_step_metadata`."""
    arrays: dict[str, npt.NDArray[Any]] = {
        "query_start_loc": inputs.query_start_loc.astype(np.int32),
        "seq_lens": inputs.seq_lens.astype(np.int32),
        "encoder_lens": inputs.encoder_lens.astype(np.int32),
    }
    for group_id, group in enumerate(inputs.groups):
        spec = memory.config.groups[group_id].spec
        if isinstance(spec, AttentionSpec):
            arrays[f"{group_id} block_table"] = group.block_table
            arrays[f"{group_id} row_mapping"] = memory.row_mapping(group_id, group.slot_mapping)
        elif isinstance(spec, MambaSpec):
            pages = _state_pages(inputs, group, spec)
            arrays |= {f"{group_id} {name}": array for name, array in pages.items()}
    return arrays


def build_step_metadata(
    memory: PagedMemory, arrays: Mapping[str, npt.NDArray[Any]], tensors: Mapping[str, Tensor]
) -> list[GroupMetadata]:
    """Build the metadata of each group from :func:`step_arrays` and their uploaded tensors."""
    starts = torch.from_numpy(arrays["query_start_loc"])
    ends = arrays.get("visible_ends")
    num_decodes = int(np.count_nonzero(np.diff(arrays["query_start_loc"]) == 1))
    layout: PackedLayout | None = None
    metadata: list[GroupMetadata] = []
    for group_id, group in enumerate(memory.config.groups):
        spec = group.spec
        if isinstance(spec, AttentionSpec):
            is_cross = isinstance(spec, CrossAttentionSpec)
            lengths = "encoder_lens" if is_cross else "seq_lens"
            metadata.append(
                AttentionMetadata(
                    query_start_loc=starts,
                    seq_lens=torch.from_numpy(arrays[lengths]),
                    block_table=tensors[f"{group_id} block_table"],
                    row_mapping=tensors[f"{group_id} row_mapping"],
                    num_decodes=num_decodes,
                    block_size=spec.block_size,
                    window=spec.window if isinstance(spec, SlidingWindowSpec) else None,
                    causal=not is_cross,
                    visible_ends=None if is_cross or ends is None else torch.from_numpy(ends),
                    on_device=(tensors["query_start_loc"], tensors[lengths]),
                )
            )
        elif isinstance(spec, MambaSpec):
            pages = tensors[f"{group_id} read_pages"], tensors[f"{group_id} write_pages"]
            has_state = tensors.get(f"{group_id} has_state")
            layout = layout or PackedLayout(starts, num_decodes, memory.buffer.device)
            metadata.append(StateMetadata(layout, *pages, has_state))
        else:
            metadata.append(None)
    return metadata


def _state_pages(
    inputs: StepInputs, group: GroupInputs, spec: MambaSpec
) -> dict[str, npt.NDArray[Any]]:
    """Return the pages of each request's last computed token and of this step's last token."""
    computed, seq_lens = inputs.num_computed_tokens, inputs.seq_lens
    has_state = computed > 0
    requests = np.arange(len(seq_lens))
    table = group.block_table.astype(np.int64)
    read = table[requests, np.maximum(computed - 1, 0) // spec.block_size]
    write = table[requests, (seq_lens - 1) // spec.block_size]
    pages = {"read_pages": np.where(has_state, read, 0), "write_pages": write}
    return pages if has_state.all() else pages | {"has_state": has_state}


@dataclass(frozen=True, slots=True, eq=False)
class ModelInputs:
    """One step's inputs, on the device.

    Attributes:
        embeds: ``(num_tokens, hidden_size)``.
        positions: int64, ``(num_tokens,)`` or ``(axes, num_tokens)``.
        arrays: all host arrays of the step, by name.
        uploaded: the same arrays on the device.
    """

    embeds: Tensor
    positions: Tensor
    step: AttentionStep
    arrays: Mapping[str, npt.NDArray[Any]]
    uploaded: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class ModelInputBuilder:
    """Builder of a step's inputs from the scheduled requests.

    Attributes:
        memory: the pages; new pages that are read before they are full are cleared.
        items: rows of multimodal items; None for a model that accepts none.
        backends: one per group of the memory; None for a group without attention.
    """

    model: CausalModel
    kv_cache_manager: KVCacheManager
    memory: PagedMemory
    batch: InputBatch
    items: EncoderCacheManager | None
    backends: Sequence[AttentionBackend | None]
    device: torch.device

    def cut(self, scheduled: Sequence[ScheduledRequest]) -> StepInputs:
        """Update the persistent tables, and gather the step's inputs from them."""
        for item in scheduled:
            self._sync_tables(item)
        requests = [item.request for item in scheduled]
        return self.batch.prepare(
            [request.request_id for request in requests],
            [request.num_computed_tokens for request in requests],
            [item.num_tokens for item in scheduled],
            [request.num_visible_encoder_tokens for request in requests],
            [item.request.num_encoder_tokens if item.runs_encoder else 0 for item in scheduled],
        )

    def build(
        self,
        step: StepInputs,
        scheduled: Sequence[ScheduledRequest] = (),
        encoded: Tensor | None = None,
        extra: Mapping[str, npt.NDArray[Any]] | None = None,
        place: Callable[[int], Tensor] | None = None,
    ) -> ModelInputs:
        """Build the model inputs; the tower rows of the step must be in their pages.

        All host arrays are uploaded in one copy.

        Args:
            extra: further arrays that the caller needs on the device; they are copied last.
            place: provides the target buffer; see :func:`upload`.
        """
        arrays = step_arrays(step, self.memory) | {
            "token_ids": step.token_ids,
            "positions": _positions(step, scheduled),
        }
        if (follows_encoder := _follows_encoder(step, scheduled)) is not None:
            arrays["follows_encoder"] = follows_encoder
        shown = () if self.items is None else tuple(_shown_items(step, scheduled))
        arrays |= _item_arrays(step, shown)
        if self.model.num_codebooks > 1:
            arrays["codes"] = self._codes(step, scheduled)
        arrays |= dict(extra or {})
        tensors = upload(arrays, self.device, place)
        embeds = self._embeds(tensors["token_ids"], tensors.get("codes"), step, scheduled)
        features = None if self.items is None else self._merge_items(embeds, shown, self.items)
        return ModelInputs(
            embeds,
            tensors["positions"],
            AttentionStep(
                self.backends,
                build_step_metadata(self.memory, arrays, tensors),
                encoded,
                tensors.get("follows_encoder"),
                tensors.get("shows_item"),
                features,
                tensors["token_ids"],
                tensors.get("codes"),
            ),
            arrays,
            tensors,
        )

    def _sync_tables(self, item: ScheduledRequest) -> None:
        request_id = item.request.request_id
        if request_id not in self.batch:
            self.batch.add(request_id, item.request.token_ids)
        for group_id, group in enumerate(self.memory.config.groups):
            size = group.spec.block_size
            is_cross = isinstance(group.spec, CrossAttentionSpec)
            if is_cross:
                first, end = 0, item.request.num_encoder_tokens
            else:
                first = item.request.num_computed_tokens
                end = first + item.num_tokens
            known = self.batch.num_blocks(request_id, group_id)
            if known * size >= end:
                continue
            block_ids = self.kv_cache_manager.block_ids(request_id, group_id, known)
            self.batch.append_blocks(request_id, block_ids, group_id)
            # This step writes the first tokens of a new last block; the rest is read too, masked.
            is_new = item.runs_encoder if is_cross else end // size * size >= first
            if is_new and end % size and isinstance(group.spec, AttentionSpec):
                self.memory.clear_page(group_id, block_ids[-1])

    def _codes(self, step: StepInputs, scheduled: Sequence[ScheduledRequest]) -> IntArray:
        """Return the codes of each token, ``(num_tokens, num_codebooks)``; -1 without codes."""
        codes = np.full((len(step.token_ids), self.model.num_codebooks), -1, dtype=np.int64)
        for item, start in zip(scheduled, step.query_start_loc.tolist(), strict=False):
            request, first = item.request, item.request.num_computed_tokens
            begin = max(first, request.num_prompt_tokens)
            drawn = request.codes_of(begin, first + item.num_tokens)
            if drawn:
                row = start + begin - first
                codes[row : row + len(drawn)] = drawn
        return codes

    def _embeds(
        self,
        token_ids: Tensor,
        codes: Tensor | None,
        step: StepInputs,
        scheduled: Sequence[ScheduledRequest],
    ) -> Tensor:
        """Return the embeddings of the step's tokens, ``(num_tokens, hidden_size)``.

        All token ids are looked up, then prompt embeddings overwrite their positions, and streamed
        rows are added. So requests of all kinds share a batch.
        """
        embeds = self.model.embed(token_ids)
        if codes is not None:
            self.model.add_codes(embeds, codes)
        for item, start in zip(scheduled, step.query_start_loc.tolist(), strict=False):
            request = item.request
            given, streamed = request.prompt_embeds, request.streamed_rows
            if given is None and streamed is None:
                continue
            chunk = embeds[start : start + item.num_tokens]
            first = request.num_computed_tokens
            if given is not None and first < given.shape[0]:
                rows = given[first : first + item.num_tokens]
                chunk[: rows.shape[0]] = rows.to(self.device)
            if streamed is not None:
                streamed.apply(chunk, first)
        return embeds

    def _merge_items(
        self, embeds: Tensor, shown: Sequence[ShownItem], manager: EncoderCacheManager
    ) -> Tensor | None:
        """Overwrite embeddings by the rows of the step's items.

        Returns:
            The part of item rows after the embedding, which is for layers after the first; None if
            no row of the step has one.
        """
        hidden, features = self.model.hidden_size, None
        for request, item, tokens, wanted in shown:
            rows = manager.rows(request.request_id, item, wanted)
            embeds[tokens] = rows[:, :hidden]
            if item.row_parts > 1:
                if features is None:
                    features = rows.new_zeros(len(embeds), rows.shape[1] - hidden)
                features[tokens] = rows[:, hidden:]
        return features


def _positions(step: StepInputs, scheduled: Sequence[ScheduledRequest]) -> IntArray:
    """Return the tokens' positions: ``(num_tokens,)``, or ``(axes, num_tokens)``.

    With several axes, a request without its own positions uses the token index on each axis.
    """
    positions = step.positions
    for item, start in zip(scheduled, step.query_start_loc.tolist(), strict=False):
        placed, first = item.request.positions, item.request.num_computed_tokens
        if placed is None:
            continue
        if positions.ndim == 1:
            positions = np.tile(positions, (placed.table.shape[0], 1))
        stop = start + item.num_tokens
        positions[:, start:stop] = placed.cut(first, first + item.num_tokens).numpy()
    return positions


def _follows_encoder(
    step: StepInputs, scheduled: Sequence[ScheduledRequest]
) -> npt.NDArray[np.bool_] | None:
    """Return a mask of tokens after their request's encoder input; None if all are."""
    starts = np.zeros_like(step.seq_lens)
    for index, item in enumerate(scheduled):
        view = item.request.encoder_view
        starts[index] = 0 if view is None else view.start
    follows = step.positions >= np.repeat(starts, step.seq_lens - step.num_computed_tokens)
    return None if follows.all() else follows


ShownItem: TypeAlias = tuple[Request, MultiModalInput, slice, slice]
"""Request, item, the step's tokens that its rows replace, and the slice of those rows."""


def _shown_items(step: StepInputs, scheduled: Sequence[ScheduledRequest]) -> Iterator[ShownItem]:
    """Yield the items of a step.

    ::

        item               |<- offset ....... end ->|
        chunk     |<- first ......... stop ->|         rows [0, stop - offset) in this step
    """
    for share, start in zip(scheduled, step.query_start_loc.tolist(), strict=False):
        first = share.request.num_computed_tokens
        stop = first + share.num_tokens
        for item in share.request.multimodal_inputs:
            if item.overlaps(first, stop):
                begin, end = max(first, item.offset), min(stop, item.end)
                tokens = slice(start + begin - first, start + end - first)
                yield share.request, item, tokens, item.rows_in(first, stop)


def _item_arrays(step: StepInputs, shown: Sequence[ShownItem]) -> dict[str, npt.NDArray[Any]]:
    """Return per token whether an item's row replaces it, and the end of its visible range.

    Empty without item rows; the ends are omitted without bidirectional items.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    for _, item, tokens, _ in shown:
        marks = arrays.setdefault("shows_item", np.zeros(len(step.token_ids), np.bool_))
        marks[tokens] = True
        if item.bidirectional:
            own = (step.positions + 1).astype(np.int32)
            # The step contains all rows that are not cached, so the item ends in this step.
            arrays.setdefault("visible_ends", own)[tokens] = item.end
    return arrays


IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """Step inputs of one KV-cache group.

    Attributes:
        block_table: ``(num_reqs, K)`` int32 of the scheduled requests, in the step's order; as wide
            as the longest of them.
        slot_mapping: ``(num_tokens,)`` slot to which each token is written; for cross-attention
            groups, one per encoder token that this step encodes.
    """

    block_table: npt.NDArray[np.int32]
    slot_mapping: IntArray


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's inputs, on the host.

    Attributes:
        positions: ``(num_tokens,)`` index of each token in its own sequence.
        token_ids: ``(num_tokens,)`` input ids.
        query_start_loc: ``(num_reqs + 1,)`` start of each request's tokens.
        seq_lens: ``(num_reqs,)`` computed tokens plus this step's.
        num_computed_tokens: ``(num_reqs,)``.
        encoder_lens: ``(num_reqs,)`` encoder tokens visible to each request's tokens.
    """

    positions: IntArray
    token_ids: IntArray
    query_start_loc: IntArray
    seq_lens: IntArray
    num_computed_tokens: IntArray
    encoder_lens: IntArray
    groups: tuple[GroupInputs, ...]


class InputBatch:
    """Token ids and block tables of the running requests, one row each.

    A row is allocated when a request starts to run and freed when it stops; rows never move.

    Args:
        block_sizes: tokens per block of each KV-cache group.
        max_encoder_lens: longest encoder sequence of each cross-attention group.
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
        self.max_num_seqs = max_num_seqs
        self.clear()

    def clear(self) -> None:
        """Free every row, even if an interrupted call left them inconsistent."""
        for table in self._block_tables:
            table.fill(0)
        self._num_blocks = [[0] * self.max_num_seqs for _ in self._block_sizes]
        self._free_rows = list(range(self.max_num_seqs - 1, -1, -1))
        self._row_of: dict[str, int] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._row_of

    def add(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Allocate a row for a request and write all tokens known so far.

        Raises:
            ValueError: if the request already has a row, or no row is free.
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
        """Free a request's row; an id without a row is ignored."""
        row = self._row_of.pop(request_id, None)
        if row is None:
            return
        for table, counts in zip(self._block_tables, self._num_blocks, strict=True):
            table[row, : counts[row]] = 0
            counts[row] = 0
        self._free_rows.append(row)

    def append_token(self, request_id: str, token_id: int) -> None:
        """Append the token that was just sampled."""
        row = self._row_of[request_id]
        self._token_ids[row, self._num_tokens[row]] = token_id
        self._num_tokens[row] += 1

    def num_blocks(self, request_id: str, group_id: int = 0) -> int:
        """Return the number of a request's blocks in the table."""
        return self._num_blocks[group_id][self._row_of[request_id]]

    def append_blocks(self, request_id: str, block_ids: Sequence[int], group_id: int = 0) -> None:
        """Append a request's new blocks."""
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
        """Gather one step's inputs from the tables.

        Args:
            request_ids: the running requests, in the order in which their tokens are packed.
            encoder_lens: visible encoder tokens per request; empty if there are none.
            num_arriving: encoder tokens encoded in this step per request; empty if there are none.
        """
        rows = np.array(list(map(self._row_of.__getitem__, request_ids)), dtype=np.int64)
        computed = np.asarray(num_computed_tokens, dtype=np.int64)
        scheduled = np.asarray(num_scheduled_tokens, dtype=np.int64)

        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int64)
        scheduled.cumsum(out=query_start_loc[1:])
        request_indices = rows.repeat(scheduled)
        # arange over all tokens, minus each request's start, plus its computed tokens
        positions = np.arange(query_start_loc[-1]) + (computed - query_start_loc[:-1]).repeat(
            scheduled
        )
        token_indices = request_indices * self._token_ids.shape[1] + positions
        seq_lens = computed + scheduled
        encoder = np.asarray(encoder_lens or [0] * len(rows), dtype=np.int64)
        arriving = np.asarray(num_arriving or [0] * len(rows), dtype=np.int64)
        return StepInputs(
            positions=positions,
            token_ids=self._token_ids.reshape(-1)[token_indices],
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            num_computed_tokens=computed,
            encoder_lens=encoder,
            groups=tuple(
                [
                    self._prepare_cross_group(group_id, rows, encoder, arriving)
                    if group_id in self._cross_groups
                    else self._prepare_group(group_id, rows, request_indices, positions, seq_lens)
                    for group_id in range(len(self._block_sizes))
                ]
            ),
        )

    def pad(self, step: StepInputs, size: int) -> StepInputs:
        """Pad a decode step to ``size`` requests, and its tables to their maximum width.

        Padding rows are sequences of one token, which is written to the null page.
        """
        rest = size - len(step.seq_lens)

        def padded(array: IntArray, value: int = 0) -> IntArray:
            return np.pad(array, (0, rest), constant_values=value)

        groups = []
        for group_id, group in enumerate(step.groups):
            rows, width = group.block_table.shape
            table = np.zeros((size, self._block_tables[group_id].shape[1]), dtype=np.int32)
            table[:rows, :width] = group.block_table
            slots = group.slot_mapping
            groups.append(
                GroupInputs(table, slots if group_id in self._cross_groups else padded(slots))
            )
        starts = np.concatenate(
            (step.query_start_loc, step.query_start_loc[-1] + np.arange(1, rest + 1))
        )
        return StepInputs(
            positions=padded(step.positions),
            token_ids=padded(step.token_ids),
            query_start_loc=starts,
            seq_lens=padded(step.seq_lens, 1),
            num_computed_tokens=padded(step.num_computed_tokens),
            encoder_lens=padded(step.encoder_lens),
            groups=tuple(groups),
        )

    def _prepare_cross_group(
        self, group_id: int, rows: IntArray, encoder_lens: IntArray, arriving: IntArray
    ) -> GroupInputs:
        """Return tables of whole encoder sequences, and slots of those encoded in this step."""
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
            slot_mapping=block_numbers * block_size + positions % block_size,
        )
