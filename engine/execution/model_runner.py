"""Runs one step of the model: inputs in, sampled tokens out, rows written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend
from engine.attention.metadata import AttentionMetadata
from engine.attention.step import AttentionStep
from engine.execution.finite_step import FiniteStep, PageContents
from engine.execution.host_copy import HostCopy
from engine.execution.input_batch import InputBatch, StepInputs
from engine.execution.model_inputs import ModelInputBuilder, ModelInputs
from engine.execution.step_metadata import build_step_metadata
from engine.interface.outputs import TokenLogprobs
from engine.models.base import CausalModel
from engine.requests.request import Request
from engine.resources.device import on_device
from engine.resources.finite_numbers import are_finite
from engine.sampling.sampler import Sampler
from engine.scheduling.scheduler_output import ScheduledRequest, SchedulerOutput
from prefix_cache import ENCODER_HIDDEN_STATES, EncoderCache, KVCacheManager, PagedMemory

__all__ = ["ModelRunner", "SampledToken", "SwapError"]


class SwapError(RuntimeError):
    """Pages could not be copied to or from the host; nothing of the step has run."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What a step chose for one request, or why the request failed in it.

    Attributes:
        request: the request that it is for.
        token_id: the chosen token; None if the request failed.
        logprobs: when asked for.
        error: why it failed: no token could be chosen, or its rows are not finite.
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
        self._inputs = ModelInputBuilder(
            model, kv_cache_manager, memory, input_batch, encoder_cache, device
        )
        self._contents = PageContents(memory)
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

        Returns:
            One entry for each request that samples, and for each that failed alone.

        Raises:
            SwapError: copying pages failed.
            ValueError: an encoder or a tower gave rows that are not finite.
            Exception: whatever the model raises.
        """
        with on_device(self._device):
            return self._execute(output)

    def _execute(self, output: SchedulerOutput) -> list[SampledToken]:
        self._swap_pages(output)
        for request in output.preempted:
            self.forget(request)
        if not output.scheduled:
            return []
        step = self._inputs.cut(output.scheduled)
        encoded = self._run_encoder(step, output.scheduled)
        self._run_towers(output.scheduled)
        tensors = self._forward(self._inputs.build(step, output.scheduled, encoded))
        mirrored = self._mirrored(tensors)
        self._host_copy.start(mirrored)
        rows = mirrored | {"hidden_states": tensors["hidden_states"]}
        check = self._check_later(step, output.scheduled, rows)
        sampled = self._sample(step, output.scheduled, tensors["hidden_states"])
        self._write_outputs(step)
        # Asked only now that the sampler has waited for the device anyway.
        errors = check.errors(step.query_start_loc.tolist())
        if not errors:
            return sampled
        failed = {output.scheduled[place].request: error for place, error in errors.items()}
        return [
            *(each for each in sampled if each.request not in failed),
            *(SampledToken(request, None, None, error) for request, error in failed.items()),
        ]

    def _check_later(
        self,
        step: StepInputs,
        scheduled: Sequence[ScheduledRequest],
        rows: Mapping[str, Tensor],
    ) -> FiniteStep:
        """Queue the question whether all that the step made is finite."""
        filled = self._contents.filled(step, [item.runs_encoder for item in scheduled])
        return FiniteStep.of(rows, self._contents, filled)

    def _swap_pages(self, output: SchedulerOutput) -> None:
        """In the order in which it was decided; see :class:`SchedulerOutput`."""
        if self._swap_memory is None:
            return
        try:
            for move in output.page_moves:
                places = self._memory, self._swap_memory
                source, target = places if move.to_host else reversed(places)
                for copy in move.copies:
                    source.copy_pages(copy, target)
        except Exception as error:  # the host's or the device's memory, whatever it is
            raise SwapError(f"swapping failed: {type(error).__name__}: {error}") from error

    def _run_encoder(
        self, step: StepInputs, scheduled: Sequence[ScheduledRequest]
    ) -> Tensor | None:
        """Rows of the encoder inputs that come with this step, packed in its order, or None."""
        entries = [
            item.request.encoder_input
            for item in scheduled
            if item.runs_encoder and item.request.encoder_input is not None
        ]
        if not entries:
            return None
        rows = self._model.encode(entries)
        if not are_finite([rows]):
            raise ValueError("the encoder gave rows that are NaN or infinite")
        mirror = self._kv.encoder_outputs
        if mirror is not None:
            group_id = self._kv.coordinator.encoder_managers[0].group_id
            slot_mapping = torch.from_numpy(step.groups[group_id].slot_mapping)
            mirror.write(slot_mapping, {ENCODER_HIDDEN_STATES: rows.cpu()})
        return rows

    def _mirrored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        mirrors = self._kv.stage_outputs.mirrors
        return {name: rows for name, rows in tensors.items() if mirrors(name)}

    def _write_outputs(self, step: StepInputs) -> None:
        """Mirror the tensors that ``HostCopy`` was started with. Publishing comes after this."""
        slot_mapping = torch.from_numpy(step.groups[self._kv.mirrored_group_id].slot_mapping)
        self._kv.stage_outputs.write(slot_mapping, self._host_copy.finish())

    @torch.inference_mode()
    def warm_up(self) -> tuple[str, ...]:
        """Run two made-up requests in the null block, so that output tensors are discovered.

        Of different lengths, so that a row per request cannot be taken for one per token.

        Returns:
            The names of all that the model emits.
        """
        self._batch.add("warm-up 0", [0] * 3)
        self._batch.add("warm-up 1", [0] * 2)
        try:
            step = self._batch.prepare(["warm-up 0", "warm-up 1"], [0, 0], [3, 2])
            with on_device(self._device):
                tensors = self._forward(self._inputs.build(step))
                if self._model.vocab_size:
                    self._model.compute_logits(tensors["hidden_states"][:1])
            self._host_copy.start(self._mirrored(tensors))
            self._write_outputs(step)
            if self._kv.encoder_outputs is not None:
                # The store is made now, by a row in the null block, so that it can be told.
                row = tensors["hidden_states"].new_zeros(1, self._model.encoder_hidden_size).cpu()
                slot = torch.zeros(1, dtype=torch.int64)
                self._kv.encoder_outputs.write(slot, {ENCODER_HIDDEN_STATES: row})
        finally:
            self._batch.remove("warm-up 0")
            self._batch.remove("warm-up 1")
            self._memory.clear_null_page()
        return tuple(tensors)

    def clear(self) -> None:
        """Forget every request, and find the outputs anew that the manager is to mirror."""
        self._batch.clear()
        self.warm_up()

    def append_token(self, request: Request, token_id: int) -> None:
        """Tell the tables the token that was accepted for a request."""
        self._batch.append_token(request.request_id, token_id)

    def forget(self, request: Request) -> None:
        """Give back a request's row; one that has none is ignored."""
        self._batch.remove(request.request_id)

    def forget_all(self) -> None:
        """Give all rows back after a step that failed, maybe while it took one.

        Requests that hold blocks are written to the tables again when they run next.
        """
        self._batch.clear()

    def _run_towers(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Run the towers for images and the like that this step begins and the cache lacks."""
        items = [entry for item in scheduled for entry in item.items_to_encode]
        if not items or self._encoder_cache is None:
            return
        encoded = self._model.encode_multimodal(items)
        if not are_finite(encoded):
            # Towers may run several items as one sequence, so that it is not known whose fault it
            # is: each request tries again by itself.
            kinds = " or ".join(sorted({entry.modality for entry in items}))
            raise ValueError(f"the tower gave rows of {kinds} that are NaN or infinite")
        for entry, rows in zip(items, encoded, strict=True):
            self._encoder_cache.fill(entry.content_hash, rows)

    def _forward(self, inputs: ModelInputs) -> dict[str, Tensor]:
        metadata = build_step_metadata(inputs.step, self._memory, self._device)
        for backend, group_metadata in zip(self._backends, metadata, strict=True):
            if backend is not None and isinstance(group_metadata, AttentionMetadata):
                backend.begin_step(group_metadata)
        tensors: dict[str, Tensor] = self._model(
            inputs.embeds,
            inputs.positions,
            AttentionStep(
                self._backends, metadata, inputs.encoded, inputs.follows_encoder, inputs.shows_item
            ),
        )
        return tensors

    def _sample(
        self, step: StepInputs, scheduled: Sequence[ScheduledRequest], hidden_states: Tensor
    ) -> list[SampledToken]:
        """Logits only for the rows that are sampled; on a CPU they are what costs most."""
        places = [place for place, item in enumerate(scheduled) if item.samples]
        if not places:
            return []
        sampling = [scheduled[place].request for place in places]
        rows = torch.from_numpy(step.query_start_loc[1:][places] - 1).to(self._device)
        logits = self._model.compute_logits(hidden_states.index_select(0, rows))
        chosen = self._sampler.sample(logits, [request.next_sampling for request in sampling])
        return [
            SampledToken(request, None if error else token_id, logprobs, error)
            for request, token_id, logprobs, error in zip(
                sampling, chosen.token_ids, chosen.logprobs, chosen.errors, strict=True
            )
        ]
