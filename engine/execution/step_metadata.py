"""What a step tells each KV-cache group's layers, made from the step's inputs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.metadata import AttentionMetadata, StateMetadata
from engine.execution.input_batch import GroupInputs, IntArray, StepInputs
from prefix_cache import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    MambaSpec,
    PagedMemory,
    SlidingWindowSpec,
)

__all__ = ["GroupMetadata", "build_step_metadata"]

GroupMetadata = AttentionMetadata | StateMetadata | None
"""None for a group without layers."""


def build_step_metadata(
    inputs: StepInputs, memory: PagedMemory, device: torch.device
) -> list[GroupMetadata]:
    """One entry per group of ``memory``'s config, on the device where that says so."""
    shared = _Shared.of(inputs)
    metadata: list[GroupMetadata] = []
    for group_id, group in enumerate(inputs.groups):
        spec = memory.config.groups[group_id].spec
        if isinstance(spec, AttentionSpec):
            row_mapping = memory.row_mapping(group_id, group.slot_mapping)
            metadata.append(_attention(shared, group, row_mapping, spec, device))
        elif isinstance(spec, MambaSpec):
            metadata.append(_states(inputs, shared, group, spec, device))
        else:
            metadata.append(None)
    return metadata


class _Shared(NamedTuple):
    """What all groups are told alike; see :class:`AttentionMetadata`.

    Attributes:
        encoder_lens: ``(num_reqs,)`` int32 on the CPU, the ``seq_lens`` of cross-attention.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    encoder_lens: Tensor
    num_decodes: int

    @classmethod
    def of(cls, inputs: StepInputs) -> _Shared:
        query_lens = inputs.seq_lens - inputs.num_computed_tokens
        return cls(
            query_start_loc=torch.from_numpy(inputs.query_start_loc.astype(np.int32)),
            seq_lens=torch.from_numpy(inputs.seq_lens.astype(np.int32)),
            encoder_lens=torch.from_numpy(inputs.encoder_lens.astype(np.int32)),
            num_decodes=int(np.count_nonzero(query_lens == 1)),
        )


def _attention(
    shared: _Shared,
    group: GroupInputs,
    row_mapping: IntArray,
    spec: AttentionSpec,
    device: torch.device,
) -> AttentionMetadata:
    is_cross = isinstance(spec, CrossAttentionSpec)
    return AttentionMetadata(
        query_start_loc=shared.query_start_loc,
        seq_lens=shared.encoder_lens if is_cross else shared.seq_lens,
        block_table=torch.from_numpy(group.block_table).to(device, non_blocking=True),
        slot_mapping=torch.from_numpy(group.slot_mapping).to(device, non_blocking=True),
        row_mapping=torch.from_numpy(row_mapping).to(device, non_blocking=True),
        num_decodes=shared.num_decodes,
        block_size=spec.block_size,
        window=spec.window if isinstance(spec, SlidingWindowSpec) else None,
        chunk_size=spec.chunk_size if isinstance(spec, ChunkedLocalAttentionSpec) else None,
        causal=not is_cross,
    )


def _states(
    inputs: StepInputs, shared: _Shared, group: GroupInputs, spec: MambaSpec, device: torch.device
) -> StateMetadata:
    """The pages of each request's last computed token, and of this step's last token."""
    computed, seq_lens = inputs.num_computed_tokens, inputs.seq_lens
    has_state = computed > 0
    requests = np.arange(len(seq_lens))
    table = group.block_table.astype(np.int64)
    read = table[requests, np.maximum(computed - 1, 0) // spec.block_size]
    write = table[requests, (seq_lens - 1) // spec.block_size]
    return StateMetadata(
        query_start_loc=shared.query_start_loc,
        num_decodes=shared.num_decodes,
        read_pages=torch.from_numpy(np.where(has_state, read, 0)).to(device),
        write_pages=torch.from_numpy(write).to(device),
        has_state=None if has_state.all() else torch.from_numpy(has_state).to(device),
    )
