"""Decode steps in static buffers, recorded once per batch size as a CUDA graph, then replayed.

A decode step consists of hundreds of small kernels, whose launches take the host longer than the
device needs to run them. A graph launches them all at once, but always with the same shapes and
memory addresses. So that one graph serves all steps of up to its size:

- the step is padded: padding rows read and write the null page, and block tables have their maximum
  width;
- all host data is in one buffer, at offsets that the size determines;
- tokens are embedded before. Ids, prompt embeddings and rows of other stages share a graph.

Prefills and mixed steps run without graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from engine.attention.metadata import AttentionMetadata
from engine.execution.input_batch import InputBatch, ModelInputs, StepInputs

Forward: TypeAlias = Callable[[ModelInputs], Mapping[str, Tensor]]
Recorder: TypeAlias = Callable[[Forward, ModelInputs], Forward]
"""Records a forward pass on inputs; the result replays it with their memory."""


class DecodeGraphs:
    """Padding, recording and replay of decode steps.

    Args:
        forward: runs the model.
        record: creates a replay callable from the model and inputs, like :class:`CudaGraphs`.
    """

    def __init__(
        self,
        forward: Forward,
        batch: InputBatch,
        device: torch.device,
        record: Recorder,
    ) -> None:
        self._forward, self._batch, self._device = forward, batch, device
        max_size = batch.max_num_seqs
        powers = (1 << power for power in range(max_size.bit_length()))
        self.sizes = (*(size for size in powers if size < max_size), max_size)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._record = record
        self._recorded: dict[tuple[torch.Size, ...], tuple[Tensor, Forward]] = {}

    def pad(self, step: StepInputs, size: int = 1) -> StepInputs | None:
        """Pad a step to the next graph size, which is at least ``size``.

        Returns None if a request has several tokens.
        """
        num_reqs = len(step.seq_lens)
        if len(step.token_ids) > num_reqs:
            return None
        size = next(each for each in self.sizes if each >= max(size, num_reqs))
        return self._batch.pad(step, size)

    def place(self, nbytes: int) -> Tensor:
        """Return the buffer for host data; growing it discards all recorded graphs."""
        if len(self._buffer) < nbytes:
            self._buffer = torch.empty(2 * nbytes, dtype=torch.uint8, device=self._device)
            self._recorded.clear()
        return self._buffer[:nbytes]

    def run(self, inputs: ModelInputs) -> Mapping[str, Tensor]:
        """Return the model's output for a padded step whose arrays are in the buffer.

        Valid until the next step. Steps with encoder input or item rows run without a graph.
        """
        step = inputs.step
        others = step.encoder_hidden_states, step.follows_encoder, step.shows_item
        if any(each is not None for each in (*others, step.item_features)):
            return self._forward(inputs)
        key = inputs.embeds.shape, inputs.positions.shape
        if key not in self._recorded:
            static = replace(inputs, embeds=inputs.embeds.clone())
            self._recorded[key] = static.embeds, self._record(self._forward, static)
        embeds, replay = self._recorded[key]
        embeds.copy_(inputs.embeds)
        return replay(replace(inputs, embeds=embeds))


class CudaGraphs:
    """Recorder of CUDA graphs, which share their memory, as only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, forward: Forward, inputs: ModelInputs) -> Forward:
        """Record a forward pass on inputs; the result replays it with their memory."""
        metadata = [
            replace(each, seq_lens=torch.full_like(each.seq_lens, _max_seq_len(each)))
            if isinstance(each, AttentionMetadata)
            else each
            for each in inputs.step.metadata
        ]
        inputs = replace(inputs, step=replace(inputs.step, metadata=metadata))
        forward(inputs)  # compiles kernels and allocates workspaces, which a recording must not
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            tensors = forward(inputs)

        def replay(_: ModelInputs) -> Mapping[str, Tensor]:
            graph.replay()
            return tensors

        return replay


def _max_seq_len(metadata: AttentionMetadata) -> int:
    """Return the sequence length for which the host plans launches, at its maximum."""
    return metadata.block_table.shape[1] * metadata.block_size
