"""Runs one step of the model: inputs in, sampled tokens out, rows written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend
from engine.attention.metadata import AttentionMetadata
from engine.attention.step import AttentionStep
from engine.execution.host_copy import HostCopy
from engine.execution.input_batch import InputBatch, StepInputs
from engine.execution.step_metadata import build_step_metadata
from engine.interface.outputs import TokenLogprobs
from engine.models.base import CausalModel
from engine.requests.request import Request
from engine.sampling.sampler import Sampler
from engine.scheduling.scheduler_output import ScheduledRequest, SchedulerOutput
from prefix_cache import (
    ENCODER_HIDDEN_STATES,
    AttentionSpec,
    CrossAttentionSpec,
    EncoderCache,
    KVCacheManager,
    PagedMemory,
)

__all__ = ["ModelRunner", "SampledToken", "SwapError"]


class SwapError(RuntimeError):
    """Pages could not be copied to or from the host; nothing of the step has run."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What a step chose for one request.

    Attributes:
        request: who it is for.
        token_id: the chosen token; None if no token could be chosen.
        logprobs: when asked for.
        error: why no token could be chosen.
    """

    request: Request
    token_id: int | None
    logprobs: TokenLogprobs | None
    error: str | None


class ModelRunner:
    """Holds the model, its paged memory and the persistent input tables.

    Args:
        model: already on ``device``; its attention layers are bound here.
        kv_cache_manager: gives block ids; its stage-output cache receives every step's rows.
        memory: the pages.
        swap_memory: the host's pages of swapped requests, or None.
        backends: one per KV-cache group; None where it has no attention.
        input_batch: the persistent tables.
        device: where the model runs.
        max_num_batched_tokens: most tokens of a step.
        encoder_cache: rows of images and the like; None for a model that takes none.
    """

    def __init__(
        self,
        model: CausalModel,
        *,
        kv_cache_manager: KVCacheManager,
        memory: PagedMemory,
        swap_memory: PagedMemory | None = None,
        backends: Sequence[AttentionBackend | None],
        input_batch: InputBatch,
        device: torch.device,
        max_num_batched_tokens: int,
        encoder_cache: EncoderCache | None = None,
    ) -> None:
        self._model = model
        self._kv = kv_cache_manager
        self._memory = memory
        self._swap_memory = swap_memory
        self._backends = tuple(backends)
        self._batch = input_batch
        self._device = device
        self._encoder_cache = encoder_cache
        self._host_copy = HostCopy(device, max_num_batched_tokens)
        self._sampler = Sampler()
        self._bind_layers()

    def _bind_layers(self) -> None:
        attention = {layer.layer_name: layer for layer in self._model.attention_layers}
        states = {layer.layer_name: layer for layer in self._model.state_layers}
        for group_id, group in enumerate(self._memory.config.groups):
            for index, name in enumerate(group.layer_names):
                if name in attention:
                    attention[name].bind(self._memory.layer(group_id, index), group_id)
                else:
                    states[name].bind(self._memory.state(group_id, index), group_id)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> list[SampledToken]:
        """Run the scheduled tokens, write their output rows, sample where a prompt has ended.

        Raises:
            SwapError: copying pages failed.
            Exception: whatever the model raises.
        """
        self._swap_pages(output)
        for request in output.preempted:
            self.forget(request)
        if not output.scheduled:
            return []
        inputs = self._prepare(output)
        encoded = self._encode(inputs, output.scheduled)
        marks = (
            _follows_encoder(inputs, output.scheduled, self._device),
            _shows_item(inputs, output.scheduled, self._device),
        )
        self._encode_items(output.scheduled)
        embeds = self._input_embeds(inputs, output.scheduled)
        positions = self._positions(inputs, output.scheduled)
        tensors = self._forward(inputs, embeds, positions, encoded, *marks)
        self._start_host_copy(tensors)
        sampled = self._sample(inputs, output.scheduled, tensors["hidden_states"])
        self._write_outputs(inputs)
        return sampled

    def _swap_pages(self, output: SchedulerOutput) -> None:
        """First out, then in: what comes in may go where something else came from."""
        if self._swap_memory is None:
            return
        try:
            for copy in output.swapped_out:
                self._memory.copy_pages(copy, self._swap_memory)
            for copy in output.swapped_in:
                self._swap_memory.copy_pages(copy, self._memory)
        except Exception as error:  # the host's or the device's memory, whatever it is
            raise SwapError(f"swapping failed: {type(error).__name__}: {error}") from error

    def _encode(self, inputs: StepInputs, scheduled: Sequence[ScheduledRequest]) -> Tensor | None:
        """Rows of the encoder inputs that come with this step, packed in its order, or None."""
        entries = [
            item.request.encoder_input
            for item in scheduled
            if item.runs_encoder and item.request.encoder_input is not None
        ]
        if not entries:
            return None
        rows = self._model.encode(entries)
        mirror = self._kv.encoder_outputs
        if mirror is not None:
            group_id = self._kv.coordinator.encoder_managers[0].group_id
            slot_mapping = torch.from_numpy(inputs.groups[group_id].slot_mapping)
            mirror.write(slot_mapping, {ENCODER_HIDDEN_STATES: rows.cpu()})
        return rows

    def _start_host_copy(self, tensors: Mapping[str, Tensor]) -> None:
        mirrors = self._kv.stage_outputs.mirrors
        self._host_copy.start({name: rows for name, rows in tensors.items() if mirrors(name)})

    def _write_outputs(self, inputs: StepInputs) -> None:
        """Mirror the tensors that ``HostCopy`` was started with. Publishing comes after this."""
        slot_mapping = torch.from_numpy(inputs.groups[self._kv.mirrored_group_id].slot_mapping)
        self._kv.stage_outputs.write(slot_mapping, self._host_copy.finish())

    @torch.inference_mode()
    def warm_up(self) -> tuple[str, ...]:
        """Run two made-up requests in the null block, so that output tensors are discovered.

        Two requests of different lengths, so that a tensor with one row per request cannot be
        taken for one with a row per token.

        Returns:
            The names of all that the model emits.
        """
        self._batch.add("warm-up 0", [0] * 3)
        self._batch.add("warm-up 1", [0] * 2)
        try:
            inputs = self._batch.prepare(["warm-up 0", "warm-up 1"], [0, 0], [3, 2])
            token_ids = torch.from_numpy(inputs.token_ids).to(self._device)
            embeds, positions = self._model.embed(token_ids), self._positions(inputs, ())
            tensors = self._forward(inputs, embeds, positions)
            if self._model.vocab_size:
                self._model.compute_logits(tensors["hidden_states"][:1])
            self._start_host_copy(tensors)
            self._write_outputs(inputs)
            self._reserve_encoder_outputs(tensors["hidden_states"].dtype)
        finally:
            self._batch.remove("warm-up 0")
            self._batch.remove("warm-up 1")
            self._memory.clear_null_page()
        return tuple(tensors)

    def _reserve_encoder_outputs(self, dtype: torch.dtype) -> None:
        """Make the store of the encoder's rows now, by a row in the null block: it is told then."""
        mirror = self._kv.encoder_outputs
        if mirror is None:
            return
        row = torch.zeros((1, self._model.encoder_hidden_size), dtype=dtype)
        mirror.write(torch.zeros(1, dtype=torch.int64), {ENCODER_HIDDEN_STATES: row})

    def append_token(self, request: Request, token_id: int) -> None:
        """Tell the tables the token that was accepted for a request."""
        self._batch.append_token(request.request_id, token_id)

    def forget(self, request: Request) -> None:
        """Give back a request's row; one that has none is ignored."""
        self._batch.remove(request.request_id)

    def _prepare(self, output: SchedulerOutput) -> StepInputs:
        for item in output.scheduled:
            self._sync_tables(item)
        return self._batch.prepare(
            [item.request.request_id for item in output.scheduled],
            [item.request.num_computed_tokens for item in output.scheduled],
            [item.num_tokens for item in output.scheduled],
            [item.request.num_visible_encoder_tokens for item in output.scheduled],
            [_num_arriving(item) for item in output.scheduled],
        )

    def _sync_tables(self, item: ScheduledRequest) -> None:
        request_id = item.request.request_id
        if request_id not in self._batch:
            self._batch.add(request_id, item.request.token_ids)
        for group_id, group in enumerate(self._memory.config.groups):
            size = group.spec.block_size
            is_cross = isinstance(group.spec, CrossAttentionSpec)
            if is_cross:
                blocks = item.request.encoder_blocks
                first, end = 0, 0 if blocks is None else blocks.num_tokens
            else:
                first = item.request.num_computed_tokens
                end = first + item.num_tokens
            known = self._batch.num_blocks(request_id, group_id)
            if known * size >= end:
                continue
            block_ids = self._kv.block_ids(request_id, group_id)
            self._batch.append_blocks(request_id, block_ids[known:], group_id)
            # The first tokens of a new last block come now; the rest of it is read, masked,
            # before it is written.
            is_new = item.runs_encoder if is_cross else end // size * size >= first
            if is_new and end % size and isinstance(group.spec, AttentionSpec):
                self._memory.clear_page(group_id, block_ids[-1])

    def _input_embeds(self, inputs: StepInputs, scheduled: Sequence[ScheduledRequest]) -> Tensor:
        """Embeddings of the step's tokens, ``(num_tokens, hidden_size)``.

        Token ids and given embeddings meet here: every position is looked up, then the positions
        that a prompt gave as embeddings, or that show an image, are overwritten, and rows that
        come beside the tokens are added. So all kinds share a batch.
        """
        token_ids = torch.from_numpy(inputs.token_ids).to(self._device, non_blocking=True)
        embeds = self._model.embed(token_ids)
        for item, start in zip(scheduled, inputs.query_start_loc.tolist(), strict=False):
            chunk = embeds[start : start + item.num_tokens]
            first = item.request.num_computed_tokens
            given = item.request.prompt_embeds
            if given is not None and first < given.shape[0]:
                rows = given[first : first + item.num_tokens]
                chunk[: rows.shape[0]] = rows.to(self._device)
            self._merge_items(chunk, item.request, first)
            if item.request.streamed_rows is not None:
                item.request.streamed_rows.apply(chunk, first)
        return embeds

    def _merge_items(self, chunk: Tensor, request: Request, first: int) -> None:
        """Overwrite what a chunk, whose first token is at ``first``, shows of the request's items.

        ::

            item               |<- offset ....... end ->|
            chunk     |<- first ......... stop ->|         rows [0, stop - offset) come now
        """
        stop = first + chunk.shape[0]
        for item in request.multimodal_inputs:
            if self._encoder_cache is not None and item.overlaps(first, stop):
                rows = self._encoder_cache.rows(item.content_hash)
                begin, end = max(first, item.offset), min(stop, item.end)
                chunk[begin - first : end - first] = rows[item.rows_in(first, stop)]

    def _encode_items(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Run the towers for the images and the like that this step begins and nobody knows."""
        items = [entry for item in scheduled for entry in item.items_to_encode]
        if not items or self._encoder_cache is None:
            return
        for entry, rows in zip(items, self._model.encode_multimodal(items), strict=True):
            self._encoder_cache.fill(entry.content_hash, rows)

    def _positions(self, inputs: StepInputs, scheduled: Sequence[ScheduledRequest]) -> Tensor:
        """Where tokens lie, int64: ``(num_tokens,)``, or ``(axes, num_tokens)``.

        On several axes, a token that nothing else is said of has its index on each of them.
        """
        positions = torch.from_numpy(inputs.positions)
        num_axes = max((item.request.num_position_axes for item in scheduled), default=1)
        if num_axes > 1:
            positions = positions.repeat(num_axes, 1)
            for item, start in zip(scheduled, inputs.query_start_loc.tolist(), strict=False):
                placed, first = item.request.positions, item.request.num_computed_tokens
                if placed is not None:
                    stop = start + item.num_tokens
                    positions[:, start:stop] = placed.cut(first, first + item.num_tokens)
        return positions.to(self._device, non_blocking=True)

    def _forward(
        self,
        inputs: StepInputs,
        inputs_embeds: Tensor,
        positions: Tensor,
        encoded: Tensor | None = None,
        follows_encoder: Tensor | None = None,
        shows_item: Tensor | None = None,
    ) -> dict[str, Tensor]:
        metadata = build_step_metadata(inputs, self._memory, self._device)
        for backend, group_metadata in zip(self._backends, metadata, strict=True):
            if backend is not None and isinstance(group_metadata, AttentionMetadata):
                backend.begin_step(group_metadata)
        tensors: dict[str, Tensor] = self._model(
            inputs_embeds,
            positions,
            AttentionStep(self._backends, metadata, encoded, follows_encoder, shows_item),
        )
        return tensors

    def _sample(
        self,
        inputs: StepInputs,
        scheduled: Sequence[ScheduledRequest],
        hidden_states: Tensor,
    ) -> list[SampledToken]:
        """Logits only for the rows that are sampled; on a CPU they are what costs most."""
        last_rows = (inputs.query_start_loc[1:] - 1).tolist()
        sampling = [
            (item.request, row)
            for item, row in zip(scheduled, last_rows, strict=True)
            if item.samples
        ]
        if not sampling:
            return []
        rows = torch.tensor([row for _, row in sampling], device=self._device)
        logits = self._model.compute_logits(hidden_states.index_select(0, rows))
        chosen = self._sampler.sample(logits, [request.next_sampling for request, _ in sampling])
        return [
            SampledToken(request, None if error else token_id, logprobs, error)
            for (request, _), token_id, logprobs, error in zip(
                sampling, chosen.token_ids, chosen.logprobs, chosen.errors, strict=True
            )
        ]


def _num_arriving(item: ScheduledRequest) -> int:
    """Encoder tokens whose keys and values this step writes for a request."""
    blocks = item.request.encoder_blocks
    return blocks.num_tokens if item.runs_encoder and blocks is not None else 0


def _follows_encoder(
    inputs: StepInputs, scheduled: Sequence[ScheduledRequest], device: torch.device
) -> Tensor | None:
    """Per token, whether it comes after its request's encoder input; None if all do."""
    starts = [
        item.request.encoder_view.start if item.request.encoder_view else 0 for item in scheduled
    ]
    if not any(starts):
        return None
    first = np.repeat(starts, inputs.seq_lens - inputs.num_computed_tokens)
    return torch.from_numpy(inputs.positions >= first).to(device)


def _shows_item(
    inputs: StepInputs, scheduled: Sequence[ScheduledRequest], device: torch.device
) -> Tensor | None:
    """Per token, whether an item's row stands in its place; None if none does."""
    marks: Tensor | None = None
    for item, start in zip(scheduled, inputs.query_start_loc.tolist(), strict=False):
        first = item.request.num_computed_tokens
        stop = first + item.num_tokens
        for shown in item.request.multimodal_inputs:
            if shown.overlaps(first, stop):
                if marks is None:
                    marks = torch.zeros(len(inputs.token_ids), dtype=torch.bool)
                begin, end = max(first, shown.offset), min(stop, shown.end)
                marks[start + begin - first : start + end - first] = True
    return None if marks is None else marks.to(device)
