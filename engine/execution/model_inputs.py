"""What the model gets in one step: embeddings, positions, and marks on tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.execution.input_batch import InputBatch, StepInputs
from engine.models.base import CausalModel
from engine.requests.request import Request
from engine.scheduling.scheduler_output import ScheduledRequest
from prefix_cache import (
    AttentionSpec,
    CrossAttentionSpec,
    EncoderCache,
    KVCacheManager,
    PagedMemory,
)

__all__ = ["ModelInputBuilder", "ModelInputs"]


@dataclass(frozen=True, slots=True, eq=False)
class ModelInputs:
    """One step's inputs, on the device.

    Attributes:
        step: what was cut from the tables, on the host.
        embeds: ``(num_tokens, hidden_size)``.
        positions: int64, ``(num_tokens,)`` or ``(axes, num_tokens)``.
        encoded: rows that the encoder of an encoder-decoder gave in this step, or None.
        follows_encoder: see :class:`AttentionStep`.
        shows_item: likewise.
    """

    step: StepInputs
    embeds: Tensor
    positions: Tensor
    encoded: Tensor | None = None
    follows_encoder: Tensor | None = None
    shows_item: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ModelInputBuilder:
    """Makes a step's inputs from the scheduled requests.

    Attributes:
        model: embeds token ids.
        kv_cache_manager: gives block ids.
        memory: the pages; new ones that are read before they are full are cleared.
        batch: the persistent tables.
        encoder_cache: rows of images and the like; None for a model that takes none.
        device: where the model runs.
    """

    model: CausalModel
    kv_cache_manager: KVCacheManager
    memory: PagedMemory
    batch: InputBatch
    encoder_cache: EncoderCache | None
    device: torch.device

    def cut(self, scheduled: Sequence[ScheduledRequest]) -> StepInputs:
        """Bring the persistent tables up to date, and cut the step's inputs from them."""
        for item in scheduled:
            self._sync_tables(item)
        return self.batch.prepare(
            [item.request.request_id for item in scheduled],
            [item.request.num_computed_tokens for item in scheduled],
            [item.num_tokens for item in scheduled],
            [item.request.num_visible_encoder_tokens for item in scheduled],
            [_num_arriving(item) for item in scheduled],
        )

    def build(
        self,
        step: StepInputs,
        scheduled: Sequence[ScheduledRequest] = (),
        encoded: Tensor | None = None,
    ) -> ModelInputs:
        """Make what the model gets; the towers' rows that the step shows are in the cache."""
        return ModelInputs(
            step,
            self._embeds(step, scheduled),
            self._positions(step, scheduled),
            encoded,
            _follows_encoder(step, scheduled, self.device),
            _shows_item(step, scheduled, self.device),
        )

    def _sync_tables(self, item: ScheduledRequest) -> None:
        request_id = item.request.request_id
        if request_id not in self.batch:
            self.batch.add(request_id, item.request.token_ids)
        for group_id, group in enumerate(self.memory.config.groups):
            size = group.spec.block_size
            is_cross = isinstance(group.spec, CrossAttentionSpec)
            if is_cross:
                blocks = item.request.encoder_blocks
                first, end = 0, 0 if blocks is None else blocks.num_tokens
            else:
                first = item.request.num_computed_tokens
                end = first + item.num_tokens
            known = self.batch.num_blocks(request_id, group_id)
            if known * size >= end:
                continue
            block_ids = self.kv_cache_manager.block_ids(request_id, group_id, known)
            self.batch.append_blocks(request_id, block_ids, group_id)
            # Of a new last block the first tokens come now; the rest is read, masked, too.
            is_new = item.runs_encoder if is_cross else end // size * size >= first
            if is_new and end % size and isinstance(group.spec, AttentionSpec):
                self.memory.clear_page(group_id, block_ids[-1])

    def _embeds(self, step: StepInputs, scheduled: Sequence[ScheduledRequest]) -> Tensor:
        """Embeddings of the step's tokens, ``(num_tokens, hidden_size)``.

        Token ids and given embeddings meet here: every position is looked up, then the positions
        that a prompt gave as embeddings, or that show an image, are overwritten, and rows that
        come beside the tokens are added. So all kinds share a batch.
        """
        token_ids = torch.from_numpy(step.token_ids).to(self.device, non_blocking=True)
        embeds = self.model.embed(token_ids)
        for item, start in zip(scheduled, step.query_start_loc.tolist(), strict=False):
            request = item.request
            if not request.has_rows:
                continue
            chunk = embeds[start : start + item.num_tokens]
            first = request.num_computed_tokens
            given = request.prompt_embeds
            if given is not None and first < given.shape[0]:
                rows = given[first : first + item.num_tokens]
                chunk[: rows.shape[0]] = rows.to(self.device)
            self._merge_items(chunk, request, first)
            if request.streamed_rows is not None:
                request.streamed_rows.apply(chunk, first)
        return embeds

    def _merge_items(self, chunk: Tensor, request: Request, first: int) -> None:
        """Overwrite what a chunk, whose first token is at ``first``, shows of the request's items.

        ::

            item               |<- offset ....... end ->|
            chunk     |<- first ......... stop ->|         rows [0, stop - offset) come now
        """
        stop = first + chunk.shape[0]
        for item in request.multimodal_inputs:
            if self.encoder_cache is not None and item.overlaps(first, stop):
                rows = self.encoder_cache.rows(item.content_hash)
                begin, end = max(first, item.offset), min(stop, item.end)
                chunk[begin - first : end - first] = rows[item.rows_in(first, stop)]

    def _positions(self, step: StepInputs, scheduled: Sequence[ScheduledRequest]) -> Tensor:
        """Where tokens lie, int64: ``(num_tokens,)``, or ``(axes, num_tokens)``.

        On several axes, a token that nothing else is said of has its index on each of them.
        """
        positions = torch.from_numpy(step.positions)
        num_axes = max((item.request.num_position_axes for item in scheduled), default=1)
        if num_axes > 1:
            positions = positions.repeat(num_axes, 1)
            for item, start in zip(scheduled, step.query_start_loc.tolist(), strict=False):
                placed, first = item.request.positions, item.request.num_computed_tokens
                if placed is not None:
                    stop = start + item.num_tokens
                    positions[:, start:stop] = placed.cut(first, first + item.num_tokens)
        return positions.to(self.device, non_blocking=True)


def _num_arriving(item: ScheduledRequest) -> int:
    """Encoder tokens whose keys and values this step writes for a request."""
    blocks = item.request.encoder_blocks
    return blocks.num_tokens if item.runs_encoder and blocks is not None else 0


def _follows_encoder(
    step: StepInputs, scheduled: Sequence[ScheduledRequest], device: torch.device
) -> Tensor | None:
    """Per token, whether it comes after its request's encoder input; None if all do."""
    starts = [
        item.request.encoder_view.start if item.request.encoder_view else 0 for item in scheduled
    ]
    if not any(starts):
        return None
    first = np.repeat(starts, step.seq_lens - step.num_computed_tokens)
    return torch.from_numpy(step.positions >= first).to(device)


def _shows_item(
    step: StepInputs, scheduled: Sequence[ScheduledRequest], device: torch.device
) -> Tensor | None:
    """Per token, whether an item's row stands in its place; None if none does."""
    marks: Tensor | None = None
    for item, start in zip(scheduled, step.query_start_loc.tolist(), strict=False):
        first = item.request.num_computed_tokens
        stop = first + item.num_tokens
        for shown in item.request.multimodal_inputs:
            if shown.overlaps(first, stop):
                if marks is None:
                    marks = torch.zeros(len(step.token_ids), dtype=torch.bool)
                begin, end = max(first, shown.offset), min(stop, shown.end)
                marks[start + begin - first : start + end - first] = True
    return None if marks is None else marks.to(device)
