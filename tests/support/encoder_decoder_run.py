"""Runs an encoder-decoder over packed batches as an engine would, with nothing of the engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.layer import AttentionStep
from engine.attention.metadata import AttentionMetadata
from engine.attention.registry import get_backend
from engine.models.encoder_module import EncoderDecoderModel
from engine.requests.encoder_input import EncoderInput
from prefix_cache import AttentionSpec, CrossAttentionSpec, PagedMemory, group_layers
from tests.support.packed_model import scatter_pages
from tests.support.paged_batch import metadata_for, with_garbage

__all__ = ["EncoderDecoderRun", "generate"]


class EncoderDecoderRun:
    """Requests in any phase: the encoder runs in a request's first step, and never again.

    All pages hold garbage until they are written.

    Args:
        model: a float32 model on the CPU.
        entries: per request, its encoder's input.
        prompts: per request, its decoder's prompt.
        max_lens: per request, the longest that its decoder sequence will be.
        backend: which attention backend.
        seed: of the block tables and the garbage.
    """

    def __init__(
        self,
        model: EncoderDecoderModel,
        entries: Sequence[EncoderInput | None],
        prompts: Sequence[Sequence[int]],
        max_lens: Sequence[int],
        *,
        backend: str = "torch",
        seed: int = 0,
    ) -> None:
        self.model = model
        self.entries = entries
        self.views = [
            model.encoder_view(entry, ids) for entry, ids in zip(entries, prompts, strict=True)
        ]
        self.done = [0] * len(entries)
        groups = group_layers({x.layer_name: x.spec for x in model.attention_layers})
        self.specs = [group.spec for group in groups if isinstance(group.spec, AttentionSpec)]
        encoder_lens = [0 if entry is None else entry.num_tokens for entry in entries]
        lens = [
            encoder_lens if isinstance(spec, CrossAttentionSpec) else max_lens
            for spec in self.specs
        ]
        config, self.tables = scatter_pages(groups, lens, seed)
        self.memory = with_garbage(PagedMemory(config), torch.Generator().manual_seed(seed))
        self.memory.clear_null_page()
        for layer in model.attention_layers:
            group_id = self.specs.index(layer.spec)
            index = groups[group_id].layer_names.index(layer.layer_name)
            layer.bind(self.memory.layer(group_id, index), group_id)
        self.backends = [
            get_backend(backend, "cpu", torch.float32, spec.block_size) for spec in self.specs
        ]

    @torch.inference_mode()
    def step(self, chunks: Sequence[Sequence[int]]) -> list[Tensor]:
        """Run the next decoder tokens of each request.

        Args:
            chunks: per request its token ids; an empty one leaves the request out.

        Returns:
            Per request ``(n, hidden)`` hidden states.
        """
        # By number of tokens, decodes first, as the metadata wants it.
        members = [r for r, chunk in enumerate(chunks) if chunk]
        batch = sorted(members, key=lambda r: len(chunks[r]))
        starting = [r for r in batch if self.done[r] == 0 and self.entries[r] is not None]
        query_lens = [len(chunks[r]) for r in batch]
        metadata = [
            self._cross_metadata(group_id, batch, query_lens, starting)
            if isinstance(spec, CrossAttentionSpec)
            else self._self_metadata(group_id, batch, query_lens)
            for group_id, spec in enumerate(self.specs)
        ]
        for backend, of_group in zip(self.backends, metadata, strict=True):
            backend.begin_step(of_group)
        positions = torch.cat(
            [torch.arange(self.done[r], self.done[r] + len(chunks[r])) for r in batch]
        )
        starts = torch.tensor([self.views[r].start for r in batch])
        follows = positions >= starts.repeat_interleave(torch.tensor(query_lens))
        inputs = [entry for r in starting if (entry := self.entries[r]) is not None]
        step = AttentionStep(
            self.backends,
            metadata,
            encoder_hidden_states=self.model.encode(inputs) if inputs else None,
            follows_encoder=None if bool(follows.all()) else follows,
        )
        ids = torch.tensor([token for r in batch for token in chunks[r]])
        hidden = self.model(self.model.embed(ids), positions, step)["hidden_states"]
        results = [hidden[:0]] * len(chunks)
        for r, rows in zip(batch, hidden.split(query_lens), strict=True):
            results[r] = rows
            self.done[r] += len(chunks[r])
        return results

    def _self_metadata(
        self, group_id: int, batch: Sequence[int], query_lens: Sequence[int]
    ) -> AttentionMetadata:
        seq_lens = [self.done[r] + n for r, n in zip(batch, query_lens, strict=True)]
        table = self.tables[group_id][list(batch)]
        return metadata_for(self.memory, query_lens, seq_lens, table, group_id=group_id)

    def _cross_metadata(
        self,
        group_id: int,
        batch: Sequence[int],
        query_lens: Sequence[int],
        starting: Sequence[int],
    ) -> AttentionMetadata:
        """A request whose tokens do not all see the same rows takes two places."""
        table, block_size = self.tables[group_id].long(), self.specs[group_id].block_size
        places = [
            (r, count, rows)
            for r, query_len in zip(batch, query_lens, strict=True)
            for count, rows in self._parts(r, query_len)
        ]
        counts = [count for _, count, _ in places]
        seq_lens = [rows for _, _, rows in places]
        slots = [torch.empty(0, dtype=torch.int64)]
        for r in starting:
            entry = self.entries[r]
            rows = torch.arange(0 if entry is None else entry.num_tokens)
            slots.append(table[r, rows // block_size] * block_size + rows % block_size)
        slot_mapping = torch.cat(slots)
        num_decodes = next((i for i, n in enumerate(counts) if n > 1), len(counts))
        return AttentionMetadata(
            query_start_loc=torch.tensor([0, *counts]).cumsum(0).int(),
            seq_lens=torch.tensor(seq_lens).int(),
            block_table=table[[r for r, _, _ in places]].int(),
            slot_mapping=slot_mapping,
            row_mapping=self.memory.row_mapping(group_id, slot_mapping),
            num_decodes=num_decodes,
            block_size=block_size,
            causal=False,
        )

    def _parts(self, r: int, query_len: int) -> list[tuple[int, int]]:
        """Numbers of tokens, with the rows that they see: before the view's start, and from it."""
        view = self.views[r]
        before = min(max(view.start - self.done[r], 0), query_len)
        parts = [(before, view.rows_before), (query_len - before, view.rows)]
        return [(count, rows) for count, rows in parts if count]


def generate(
    model: EncoderDecoderModel,
    entries: Sequence[EncoderInput | None],
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    chunk: int = 3,
    backend: str = "torch",
) -> tuple[list[list[int]], list[Tensor]]:
    """Greedy tokens of all requests, each beginning a step after the one before it.

    Args:
        model: a float32 model on the CPU.
        entries: per request, its encoder's input.
        prompts: per request, its decoder's prompt.
        num_tokens: to generate for each.
        chunk: most tokens of a prompt that one step runs.
        backend: which attention backend.

    Returns:
        Per request its tokens, prompt first, and ``(tokens - 1, hidden)`` hidden states.
    """
    tokens = [list(prompt) for prompt in prompts]
    ends = [len(prompt) + num_tokens for prompt in prompts]
    run = EncoderDecoderRun(model, entries, prompts, ends, backend=backend)
    hidden: list[list[Tensor]] = [[] for _ in prompts]
    step = 0
    while any(len(ids) < end for ids, end in zip(tokens, ends, strict=True)):
        chunks = [
            ids[run.done[r] : run.done[r] + chunk] if r <= step and len(ids) < ends[r] else []
            for r, ids in enumerate(tokens)
        ]
        for r, rows in enumerate(run.step(chunks)):
            hidden[r].append(rows)
            if len(rows) and run.done[r] == len(tokens[r]):
                tokens[r].append(int(model.compute_logits(rows[-1:]).argmax()))
        step += 1
    return tokens, [torch.cat(rows) for rows in hidden]
