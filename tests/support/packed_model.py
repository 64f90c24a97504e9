"""Runs a model over packed batches as an engine would, with nothing of the engine in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.layer import Attention, AttentionStep, StateLayer
from engine.attention.metadata import AttentionMetadata, StateMetadata
from engine.attention.registry import get_backend
from engine.models.base import CausalModel
from prefix_cache import (
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    MambaSpec,
    PagedMemory,
    SlidingWindowSpec,
    group_layers,
)
from tests.support.paged_batch import metadata_for

__all__ = ["PackedRun", "run_packed", "scatter_pages"]

# Every byte of it, so that any float32 read from it is NaN.
_NAN_BYTE = 0xFF


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
        seed: of the block tables.

    Returns:
        Per request ``(n, hidden)`` hidden states.
    """
    lengths = [len(sequence) for sequence in sequences]
    run = PackedRun(model, lengths, backend=backend, seed=seed)
    rows: list[list[Tensor]] = [[] for _ in sequences]
    for counts in steps:
        chunks = [
            sequence[done : done + count]
            for sequence, done, count in zip(sequences, run.done, counts, strict=True)
        ]
        for parts, hidden in zip(rows, run.step(chunks), strict=True):
            parts.append(hidden)
    assert run.done == lengths, "the steps do not add up to the sequences"
    return [torch.cat(parts) for parts in rows]


class PackedRun:
    """Requests that a model runs in packed steps, with pages for each group of its layers.

    Pages that a window has passed are filled with NaN, as if another request had got them: the
    block tables still name them, and nothing may read them. Pages of states hold NaN until they
    are written; a state is kept in the page of its last token's block.

    Args:
        model: a float32 model on the CPU.
        max_lens: per request, the longest that its sequence will be.
        backend: which attention backend.
        seed: of the block tables.
    """

    def __init__(
        self, model: CausalModel, max_lens: Sequence[int], *, backend: str = "torch", seed: int = 0
    ) -> None:
        self.model = model
        self.done = [0] * len(max_lens)
        layers: list[Attention | StateLayer] = [*model.attention_layers, *model.state_layers]
        groups = group_layers({layer.layer_name: layer.spec for layer in layers})
        self.specs: list[KVCacheSpec] = [group.spec for group in groups]
        self.config, self.tables = scatter_pages(groups, [max_lens] * len(groups), seed)
        self.memory = PagedMemory(self.config)
        for layer in layers:
            group_id = self.specs.index(layer.spec)
            index = groups[group_id].layer_names.index(layer.layer_name)
            if isinstance(layer, Attention):
                layer.bind(self.memory.layer(group_id, index), group_id)
            else:
                layer.bind(self.memory.state(group_id, index), group_id)
        self.backends = [
            None
            if isinstance(spec, MambaSpec)
            else get_backend(backend, "cpu", torch.float32, spec.block_size)
            for spec in self.specs
        ]
        for group_id, spec in enumerate(self.specs):
            if isinstance(spec, MambaSpec):
                self._pages(group_id)[self.tables[group_id].long()] = _NAN_BYTE

    @torch.inference_mode()
    def step(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        """Run the next tokens of each request.

        Args:
            chunks: per request ``(n,)`` token ids; an empty one leaves the request out.

        Returns:
            Per request ``(n, hidden)`` hidden states.
        """
        counts = [len(chunk) for chunk in chunks]
        # By number of tokens, decodes first, as the metadata wants it.
        batch = sorted((r for r, count in enumerate(counts) if count), key=lambda r: counts[r])
        starts, query_lens = [self.done[r] for r in batch], [counts[r] for r in batch]
        ends = [start + count for start, count in zip(starts, query_lens, strict=True)]
        metadata: list[AttentionMetadata | StateMetadata] = []
        for group_id, attention in enumerate(self.backends):
            if attention is None:
                metadata.append(self._state_metadata(group_id, batch, query_lens, ends))
            else:
                metadata.append(self._metadata(group_id, batch, query_lens, ends))
                attention.begin_step(metadata[-1])
        embeds = torch.cat([self.embed(r, chunks[r]) for r in batch])
        positions = torch.cat([self.positions(r, len(chunks[r])) for r in batch], dim=-1)
        step = AttentionStep(self.backends, metadata)
        hidden = self.model(embeds, positions, step)["hidden_states"]
        results = [hidden[:0]] * len(chunks)
        for r, part in zip(batch, hidden.split(query_lens), strict=True):
            results[r] = part
            self.done[r] += counts[r]
        self._spoil_what_windows_passed()
        return results

    def embed(self, request: int, chunk: Tensor) -> Tensor:
        """``(n, hidden)`` embeddings of a request's next tokens."""
        return self.model.embed(chunk)

    def positions(self, request: int, count: int) -> Tensor:
        """``(n,)`` positions of a request's next tokens."""
        return torch.arange(self.done[request], self.done[request] + count)

    def _metadata(
        self, group_id: int, batch: list[int], query_lens: list[int], seq_lens: list[int]
    ) -> AttentionMetadata:
        table = self.tables[group_id][batch]
        window = _window(self.specs[group_id])
        return metadata_for(
            self.memory, query_lens, seq_lens, table, group_id=group_id, window=window
        )

    def _state_metadata(
        self, group_id: int, batch: list[int], query_lens: list[int], seq_lens: list[int]
    ) -> StateMetadata:
        lengths = torch.tensor([query_lens, seq_lens])
        query_start_loc = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
        done = lengths[1] - lengths[0]
        table = self.tables[group_id][batch].long()
        last_blocks = (torch.stack((done, lengths[1])) - 1) // self.specs[group_id].block_size
        read, write = (table.gather(1, b.clamp(min=0)[:, None])[:, 0] for b in last_blocks)
        return StateMetadata(
            query_start_loc=query_start_loc,
            num_decodes=query_lens.count(1),
            read_pages=read.where(done > 0, 0),
            write_pages=write,
            has_state=done > 0,
        )

    def _pages(self, group_id: int) -> Tensor:
        return self.memory.buffer.view(-1, self.config.groups[group_id].page_bytes)

    def _spoil_what_windows_passed(self) -> None:
        for group_id, spec in enumerate(self.specs):
            window = _window(spec)
            if window is None:
                continue
            pages = self._pages(group_id)
            for table, done in zip(self.tables[group_id], self.done, strict=True):
                # The next token, at position `done`, sees `window` positions with its own.
                num_passed = max(0, done - window + 1) // spec.block_size
                pages[table[:num_passed].long()] = _NAN_BYTE


def _window(spec: KVCacheSpec) -> int | None:
    return spec.window if isinstance(spec, SlidingWindowSpec) else None


def scatter_pages(
    groups: Sequence[KVCacheGroup], max_lens: Sequence[Sequence[int]], seed: int
) -> tuple[KVCacheConfig, list[Tensor]]:
    """A memory large enough, and a block table per group with pages in no order.

    Args:
        groups: of the model's layers.
        max_lens: per group and request, the longest that its sequence will be.
        seed: of the order.

    Groups get large pages of their own, because their small pages are of different sizes.
    """
    generator = torch.Generator().manual_seed(seed)
    needed = [
        [-(-n // group.spec.block_size) for n in lens]
        for group, lens in zip(groups, max_lens, strict=True)
    ]
    per_large = [
        KVCacheConfig(2, tuple(groups)).pages_per_large_page(g) for g in range(len(groups))
    ]
    num_large = [-(-sum(n) // per) for n, per in zip(needed, per_large, strict=True)]
    # Large page 0 is the null page.
    free = (torch.randperm(sum(num_large), generator=generator) + 1).split(num_large)
    tables = []
    for counts, per, large_pages in zip(needed, per_large, free, strict=True):
        pages = (large_pages[:, None] * per + torch.arange(per)).flatten()
        pages = pages[torch.randperm(len(pages), generator=generator)][: sum(counts)]
        rows = pages.to(torch.int32).split(counts)
        tables.append(torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True))
    return KVCacheConfig(1 + sum(num_large), tuple(groups)), tables
