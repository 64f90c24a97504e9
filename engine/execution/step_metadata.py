"""What a step tells each KV-cache group's layers, made from the step's inputs."""

from __future__ import annotations

import numpy as np
import torch

from engine.attention.metadata import AttentionMetadata, StateMetadata
from engine.execution.input_batch import GroupInputs, StepInputs
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
    metadata: list[GroupMetadata] = []
    for group_id, group in enumerate(inputs.groups):
        spec = memory.config.groups[group_id].spec
        if isinstance(spec, AttentionSpec):
            metadata.append(_attention(inputs, group_id, group, spec, memory, device))
        elif isinstance(spec, MambaSpec):
            metadata.append(_states(inputs, group, spec, device))
        else:
            metadata.append(None)
    return metadata


def _attention(
    inputs: StepInputs,
    group_id: int,
    group: GroupInputs,
    spec: AttentionSpec,
    memory: PagedMemory,
    device: torch.device,
) -> AttentionMetadata:
    query_lens = inputs.seq_lens - inputs.num_computed_tokens
    is_cross = isinstance(spec, CrossAttentionSpec)
    seq_lens = inputs.encoder_lens if is_cross else inputs.seq_lens
    slot_mapping = torch.from_numpy(group.slot_mapping).to(device, non_blocking=True)
    return AttentionMetadata(
        query_start_loc=torch.from_numpy(inputs.query_start_loc).int(),
        seq_lens=torch.from_numpy(seq_lens).int(),
        block_table=torch.from_numpy(group.block_table).to(device, non_blocking=True),
        slot_mapping=slot_mapping,
        row_mapping=memory.row_mapping(group_id, slot_mapping),
        num_decodes=int((query_lens == 1).sum()),
        block_size=spec.block_size,
        window=spec.window if isinstance(spec, SlidingWindowSpec) else None,
        chunk_size=spec.chunk_size if isinstance(spec, ChunkedLocalAttentionSpec) else None,
        causal=not is_cross,
    )


def _states(
    inputs: StepInputs, group: GroupInputs, spec: MambaSpec, device: torch.device
) -> StateMetadata:
    """The pages of each request's last computed token, and of this step's last token."""
    computed, seq_lens = inputs.num_computed_tokens, inputs.seq_lens
    requests = np.arange(len(seq_lens))
    table = group.block_table.astype(np.int64)
    read = table[requests, np.maximum(computed - 1, 0) // spec.block_size]
    write = table[requests, (seq_lens - 1) // spec.block_size]
    return StateMetadata(
        query_start_loc=torch.from_numpy(inputs.query_start_loc).int(),
        num_decodes=int((seq_lens - computed == 1).sum()),
        read_pages=torch.from_numpy(np.where(computed > 0, read, 0)).to(device),
        write_pages=torch.from_numpy(write).to(device),
        has_state=torch.from_numpy(computed > 0).to(device),
    )
