"""Runs a model over packed batches as an engine would, with nothing of the engine in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention import AttentionStep, get_backend
from engine.models import CausalModel
from prefix_cache import KVCacheConfig, PagedMemory, group_layers
from tests.support.paged_batch import metadata_for, random_block_table

__all__ = ["run_packed"]


@torch.inference_mode()
def run_packed(
    model: CausalModel,
    sequences: Sequence[Tensor],
    steps: Sequence[Sequence[int]],
    *,
    backend: str = "torch",
    seed: int = 0,
) -> list[Tensor]:
    """Feed sequences in chunks, all requests of a step in one packed batch.

    Args:
        model: a float32 model on the CPU.
        sequences: token ids ``(n,)`` of each request.
        steps: per step, how many tokens of each request to run; 0 leaves a request out. They
            must add up to the sequences.
        backend: which attention backend.
        seed: of the block table.

    Returns:
        Per request ``(n, hidden)`` hidden states.
    """
    specs = {layer.layer_name: layer.spec for layer in model.attention_layers}
    (group,) = groups = group_layers(specs)
    block_size = group.spec.block_size
    lengths = [len(sequence) for sequence in sequences]
    num_blocks = 4 + sum(-(-length // block_size) for length in lengths)
    memory = PagedMemory(KVCacheConfig(num_blocks, groups))
    for index, layer in enumerate(model.attention_layers):
        layer.bind(memory.layer(0, index), 0)
    generator = torch.Generator().manual_seed(seed)
    table = random_block_table(lengths, block_size, num_blocks, generator)
    attention = get_backend(backend, "cpu", torch.float32, block_size)

    done = [0] * len(sequences)
    rows: list[list[Tensor]] = [[] for _ in sequences]
    for counts in steps:
        # Decodes first, as the metadata wants it.
        batch = sorted((r for r, count in enumerate(counts) if count), key=lambda r: counts[r] != 1)
        spans = [(done[r], done[r] + counts[r]) for r in batch]
        metadata = metadata_for(
            memory, [counts[r] for r in batch], [end for _, end in spans], table[batch]
        )
        attention.begin_step(metadata)
        ids = torch.cat([sequences[r][a:b] for r, (a, b) in zip(batch, spans, strict=True)])
        positions = torch.cat([torch.arange(a, b) for a, b in spans])
        hidden = model(model.embed(ids), positions, AttentionStep([attention], [metadata]))
        for r, part in zip(
            batch, hidden["hidden_states"].split([counts[r] for r in batch]), strict=True
        ):
            rows[r].append(part)
            done[r] += counts[r]
    assert done == lengths, "the steps do not add up to the sequences"
    return [torch.cat(parts) for parts in rows]
