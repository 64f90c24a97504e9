"""Steps of decodes in static buffers: recorded once for each size as a CUDA graph, then replayed.

A step of decodes is hundreds of small kernels, whose launches take the host longer than the device
needs to run them. A graph launches them all at once, but always with the same shapes, from and to
the same memory. So that one does for all steps of up to its size:

- the step is padded: rows that are no request's read and write the null page, and block tables are
  as wide as they get;
- all that comes from the host lies in one buffer, at places that the size determines;
- tokens are embedded before. Ids, prompts of embeddings and rows of other stages share a graph.

Prefills, and steps that mix both, run as they come.
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
"""Makes of a model, and inputs, what does with their memory the same once more."""


class DecodeGraphs:
    """Pads steps of decodes, and records and replays what a model does in them.

    Args:
        forward: runs the model.
        record: makes a callable of the model and inputs, as :class:`CudaGraphs` do.
    """

    def __init__(
        self,
        forward: Forward,
        batch: InputBatch,
        device: torch.device,
        record: Recorder,
    ) -> None:
        self._forward, self._batch, self._device = forward, batch, device
        most = batch.max_num_seqs
        powers = (1 << power for power in range(most.bit_length()))
        self.sizes = (*(size for size in powers if size < most), most)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._record = record
        self._recorded: dict[tuple[torch.Size, ...], tuple[Tensor, Forward]] = {}

    def pad(self, step: StepInputs, size: int = 1) -> StepInputs | None:
        """The step for the next larger size, which is no less than ``size``.

        None if a request has several tokens.
        """
        num_reqs = len(step.seq_lens)
        if len(step.token_ids) > num_reqs:
            return None
        size = next(each for each in self.sizes if each >= max(size, num_reqs))
        return self._batch.pad(step, size)

    def place(self, nbytes: int) -> Tensor:
        """The buffer of what comes from the host; a larger one is a new one, for new graphs."""
        if len(self._buffer) < nbytes:
            self._buffer = torch.empty(2 * nbytes, dtype=torch.uint8, device=self._device)
            self._recorded.clear()
        return self._buffer[:nbytes]

    def run(self, inputs: ModelInputs) -> Mapping[str, Tensor]:
        """What the model gives for a padded step, whose arrays lie in the buffer.

        Valid until the next step. A last token of a prompt that shows an image runs as it comes.
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
    """Records CUDA graphs, which share their memory: one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, forward: Forward, inputs: ModelInputs) -> Forward:
        """Record what a model does with inputs; the result does so again with their memory."""
        metadata = [
            replace(each, seq_lens=torch.full_like(each.seq_lens, _longest(each)))
            if isinstance(each, AttentionMetadata)
            else each
            for each in inputs.step.metadata
        ]
        inputs = replace(inputs, step=replace(inputs.step, metadata=metadata))
        forward(inputs)  # compiles kernels and takes workspaces, which a recording must not
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            tensors = forward(inputs)

        def replay(_: ModelInputs) -> Mapping[str, Tensor]:
            graph.replay()
            return tensors

        return replay


def _longest(metadata: AttentionMetadata) -> int:
    """The host plans launches for it, whatever the lengths on the device are."""
    return metadata.block_table.shape[1] * metadata.block_size
