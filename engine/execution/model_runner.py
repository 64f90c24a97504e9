"""Model runner: executes one step, from inputs to sampled tokens and written rows.

It detects the requests for which a step computed NaN or infinity, before anything is published.

It checks the rows of every request (the last layer's and other mirrored ones), and the keys and
values of every block that the step has filled. That covers everything that others can ever hit:

- keys and values directly, because a kernel may ignore a bad key: one of minus infinity has no
  weight, and some kernels return zeros if no key has any;
- states of recurrent layers through the rows: there is no softmax between them, and sums, products
  and norms propagate every non-finite value as NaN or infinity to the last layer;
- blocks of earlier steps were checked in those steps.

A partial block is checked when it becomes full, or when its request ends inside it and leaves it to
others; until then only its own request reads it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import starmap

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.layer import AttentionStep
from engine.attention.metadata import AttentionBackend, AttentionMetadata
from engine.execution.decode_graphs import DecodeGraphs, Recorder
from engine.execution.input_batch import (
    InputBatch,
    ModelInputBuilder,
    ModelInputs,
    StepInputs,
)
from engine.execution.tensor_parallel import followers_of
from engine.interface.outputs import TokenLogprobs
from engine.models.base import CausalModel
from engine.native import NativeKernels
from engine.requests.request import Request
from engine.resources.device import are_finite, on_device, total, upload
from engine.sampling.sampler import FurtherDraws, Judgement, Sampler, SamplingState
from engine.scheduling.request_queues import EncoderCacheManager
from engine.scheduling.scheduler import ScheduledRequest, SchedulerOutput
from prefix_cache import (
    ENCODER_HIDDEN_STATES,
    AttentionSpec,
    CrossAttentionSpec,
    KVCacheManager,
    PagedMemory,
)

# Names of arrays uploaded to and copied from the device, besides the model's inputs and outputs.
_SAMPLED, _FINITE = "rows to sample", "sum of what was made"
_FILLED = "pages filled in group "


class HostCopy:
    """Asynchronous copy of named tensors to the host, through pinned memory from CUDA.

    ``start`` queues the copies on the current stream; ``finish`` waits for them. In between, the
    caller queues the sampler, whose own read-back waits for the same stream, so the copies add no
    wait. The result of ``finish`` is valid until the next ``start``.
    """

    def __init__(self, device: torch.device, max_rows: int) -> None:
        self._device = device
        self._max_rows = max_rows
        self._pinned: dict[str, Tensor] = {}
        self._pending: dict[str, Tensor] = {}

    def start(self, tensors: Mapping[str, Tensor]) -> None:
        """Queue copies of ``name -> (rows, ...)``; on a CPU the tensors are not copied."""
        if self._device.type != "cuda":
            self._pending = dict(tensors)
            return
        self._pending = {name: self._copy(name, tensor) for name, tensor in tensors.items()}

    def finish(self) -> dict[str, Tensor]:
        """Wait for the copies and return them."""
        if self._device.type == "cuda" and self._pending:
            torch.cuda.current_stream(self._device).synchronize()
        done, self._pending = self._pending, {}
        return done

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        staging = self._pinned.get(name)
        if staging is None or staging.shape[1:] != tensor.shape[1:]:
            shape = (self._max_rows, *tensor.shape[1:])
            staging = torch.empty(shape, dtype=tensor.dtype, pin_memory=True)
            self._pinned[name] = staging
        view = staging[: tensor.shape[0]]
        view.copy_(tensor, non_blocking=True)
        return view


@dataclass(frozen=True, slots=True)
class FilledPage:
    """Page that a step has filled completely."""

    index: int
    group_id: int
    page_id: int


class PageContents:
    """Contents of the pages of attention groups, without padding."""

    def __init__(self, memory: PagedMemory) -> None:
        self._followers = followers_of(memory)
        self._specs: dict[int, AttentionSpec] = {}
        self._pages: dict[int, Tensor] = {}
        for group_id, group in enumerate(memory.config.groups):
            if isinstance(group.spec, AttentionSpec):
                layer = memory.layer(group_id, 0)
                pages = layer.chunks.unflatten(0, (-1, layer.chunks_per_page))
                self._specs[group_id] = group.spec
                self._pages[group_id] = pages[:, : 2 * len(group.layer_names)].flatten(1)

    @property
    def token_groups(self) -> list[int]:
        """Ids of the groups whose pages hold a request's tokens."""
        return [g for g, spec in self._specs.items() if not isinstance(spec, CrossAttentionSpec)]

    def filled(self, step: StepInputs, runs_encoder: Sequence[bool]) -> list[FilledPage]:
        """Return the pages that a step fills, including all encoder pages if the encoder runs."""
        found = []
        for group_id, spec in self._specs.items():
            size, table = spec.block_size, step.groups[group_id].block_table
            if isinstance(spec, CrossAttentionSpec):
                first = np.zeros_like(step.encoder_lens)
                stop = np.where(runs_encoder, -(-step.encoder_lens // size), 0)
            else:
                first, stop = step.num_computed_tokens // size, step.seq_lens // size
            for index in (stop > first).nonzero()[0].tolist():
                ids = table[index, first[index] : stop[index]].tolist()
                found += [FilledPage(index, group_id, page_id) for page_id in ids]
        return found

    def numbers(
        self, pages: Sequence[FilledPage], indices: Mapping[str, Tensor] | None = None
    ) -> list[Tensor]:
        """Return keys and values of pages: views on a CPU, else gathered by one kernel per group.

        Args:
            indices: the pages' :func:`page_indices` on the device, if uploaded already.
        """
        if not pages:
            return []
        device = self._pages[pages[0].group_id].device
        if device.type == "cpu":
            return [self._pages[page.group_id][page.page_id] for page in pages]
        if indices is None:
            indices = upload(page_indices(pages), device)
        return [
            contents.index_select(0, indices[name])
            for group_id, contents in self._pages.items()
            if (name := _filled(group_id)) in indices
        ]

    def are_finite(self, pages: Sequence[FilledPage]) -> bool:
        """Return True if all keys and values of pages are finite."""
        mine = are_finite(self.numbers(pages))
        if self._followers is None:
            return mine
        return self._followers.are_finite([(p.group_id, p.page_id) for p in pages], mine)

    def errors(
        self,
        rows: Mapping[str, Tensor],
        filled: Sequence[FilledPage],
        query_start_loc: Sequence[int],
    ) -> dict[int, str]:
        """Return an error message for each request with non-finite results in a step.

        Args:
            rows: ``name -> (num_tokens, ...)``.
        """
        found: dict[int, list[str]] = {}
        for name, made in rows.items():
            is_finite = made.isfinite().reshape(len(made), -1).all(1).cpu()
            for index, start in enumerate(query_start_loc[:-1]):
                if not is_finite[start : query_start_loc[index + 1]].all():
                    found.setdefault(index, []).append(name)
        for index in sorted({page.index for page in filled}):
            if not self.are_finite([page for page in filled if page.index == index]):
                found.setdefault(index, []).append("keys or values")
        return {
            index: f"the model's {' and '.join(names)} are NaN or infinite for some of its tokens"
            for index, names in found.items()
        }


def page_indices(pages: Sequence[FilledPage]) -> dict[str, NDArray[np.int64]]:
    """Return the ids of pages, per group that has any."""
    return {
        _filled(group_id): np.array(
            [page.page_id for page in pages if page.group_id == group_id], dtype=np.int64
        )
        for group_id in {page.group_id for page in pages}
    }


def pages_of(arrays: Mapping[str, NDArray[np.int64]]) -> list[FilledPage]:
    """Return the pages of a step's :func:`page_indices`, with group and id only."""
    return [
        FilledPage(0, int(name.removeprefix(_FILLED)), page_id)
        for name, page_ids in arrays.items()
        if name.startswith(_FILLED)
        for page_id in page_ids.tolist()
    ]


def _filled(group_id: int) -> str:
    return f"{_FILLED}{group_id}"


def bind_layers(model: CausalModel, memory: PagedMemory) -> None:
    """Bind every layer that caches something to its part of the memory."""
    attention = {layer.layer_name: layer for layer in model.attention_layers}
    states = {layer.layer_name: layer for layer in model.state_layers}
    for group_id, group in enumerate(memory.config.groups):
        for index, name in enumerate(group.layer_names):
            if name in attention:
                attention[name].bind(memory.layer(group_id, index), group_id)
            else:
                states[name].bind(memory.state(group_id, index), group_id)


def run_layers(
    model: CausalModel, embeds: Tensor, positions: Tensor, step: AttentionStep
) -> dict[str, Tensor]:
    """Run a model on one step; see :meth:`CausalModel.forward`."""
    for backend, metadata in zip(step.backends, step.metadata, strict=True):
        if backend is not None and isinstance(metadata, AttentionMetadata):
            backend.begin_step(metadata)
    tensors: dict[str, Tensor] = model(embeds, positions, step)
    return tensors


class SwapError(RuntimeError):
    """Pages could not be copied to or from the host; nothing of the step has run."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """Token that a step sampled for one request, or the error of the request.

    Attributes:
        token_id: the chosen token; None if the request failed.
        error: reason of a failure: no token could be chosen, or its rows are not finite.
        codes: in models with several codebooks, codes sampled after the token in the same step.
        judgement: likelihood of the token, if the request needs it.
    """

    request: Request
    token_id: int | None
    logprobs: TokenLogprobs | None
    error: str | None
    codes: tuple[int, ...] = ()
    judgement: Judgement | None = None


class ModelRunner:
    """Owner of the model, its paged memory and the persistent input tables.

    Args:
        model: model on ``device``; its attention layers are bound here.
        kv_cache_manager: provides block ids; its stage-output cache receives every step's rows.
        swap_memory: host pages of swapped requests, or None.
        backends: one per KV-cache group; None for a group without attention.
        items: rows of multimodal items; None for a model that accepts none.
        row_dtype: dtype of mirrored floating-point rows; None: the model's.
        record: recorder of decode steps for replay; None: run them without graphs.
        deterministic: if true, run components whose rounding depends on the batch (encoders,
            towers, further codebooks) for one input, item or token at a time.
        kernels: for sampling on a CPU; None: torch does their work.
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
        items: EncoderCacheManager | None = None,
        row_dtype: torch.dtype | None = None,
        record: Recorder | None = None,
        deterministic: bool = False,
        kernels: NativeKernels | None = None,
    ) -> None:
        self._model, self._followers = model, followers_of(memory)
        self._deterministic = deterministic
        self._row_dtype = row_dtype
        self._kv = kv_cache_manager
        self._memory = memory
        self._swap_memory = swap_memory
        self._batch = input_batch
        self._device = device
        self._items = items
        self._inputs = ModelInputBuilder(
            model, kv_cache_manager, memory, input_batch, items, tuple(backends), device
        )
        self._contents = PageContents(memory)
        self._host_copy = HostCopy(device, max_num_batched_tokens)
        self._sampler = Sampler(kernels)
        self._graphs: DecodeGraphs | None = None
        if record is not None:
            self._graphs = DecodeGraphs(self._decode, input_batch, device, record)
        self._aligned = [layer for layer in model.attention_layers if layer.aligned_heads]
        bind_layers(model, memory)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> list[SampledToken]:
        """Run the scheduled tokens, write their output rows, and sample after complete prompts.

        Returns:
            One entry for each request that samples, and for each that failed individually.

        Raises:
            ValueError: if an encoder or a tower returned rows that are not finite.
            Exception: any error of the model.
        """
        with on_device(self._device):
            return self._execute(output)

    def _execute(self, output: SchedulerOutput) -> list[SampledToken]:
        if self._swap_memory is not None:
            self._swap_pages(output, self._swap_memory)
        for request in output.preempted:
            self.forget(request)
        if not output.scheduled:
            return []
        step = self._inputs.cut(output.scheduled)
        runs_encoder = [item.runs_encoder for item in output.scheduled]
        encoded = self._run_encoder(step, output.scheduled) if any(runs_encoder) else None
        if self._items is not None:
            self._run_towers(output.scheduled, self._items)
        filled = self._contents.filled(step, runs_encoder)
        samples = [index for index, item in enumerate(output.scheduled) if item.samples]
        extra = {_SAMPLED: step.query_start_loc[1:][samples] - 1}
        if filled:
            extra |= page_indices(filled)
        with self._together():
            inputs, tensors = self._run(step, output.scheduled, encoded, extra)
            mirrored = self._mirrored(tensors)
            rows = mirrored | {"hidden_states": tensors["hidden_states"]}
            # Queue the check that all results are finite; its result is read at the end.
            made = total([*rows.values(), *self._contents.numbers(filled, inputs.uploaded)])[None]
            if self._followers is not None and filled:
                self._followers.shards.add_up(made)
        if self._aligned:
            self._keep_queries(step, output.scheduled)
        self._host_copy.start(mirrored | {_FINITE: made})
        sampling = [output.scheduled[index].request for index in samples]
        sampled = self._sample(tensors["hidden_states"], inputs.uploaded[_SAMPLED], sampling)
        # Wait only now, because the sampler has waited for the device anyway.
        on_host = self._host_copy.finish()
        is_finite = math.isfinite(on_host.pop(_FINITE).item())
        self._write_outputs(step, on_host)
        if is_finite:
            return sampled
        errors = self._contents.errors(rows, filled, step.query_start_loc.tolist())
        failed = {output.scheduled[index].request: error for index, error in errors.items()}
        return [
            *(each for each in sampled if each.request not in failed),
            *(SampledToken(request, None, None, error) for request, error in failed.items()),
        ]

    def _keep_queries(self, step: StepInputs, scheduled: Sequence[ScheduledRequest]) -> None:
        """Store the queries of requests whose text will be aligned."""
        for index, item in enumerate(scheduled):
            if item.request.is_aligned:
                start, stop = step.query_start_loc[index : index + 2].tolist()
                queries = [layer.queries for layer in self._aligned if layer.queries is not None]
                rows = torch.cat([each[start:stop] for each in queries], dim=1).cpu()
                item.request.queries |= dict(enumerate(rows, item.request.num_computed_tokens))

    @torch.inference_mode()
    def alignment(self, request: Request) -> Tensor | None:
        """Return the cross-attention of a running request's generated tokens to encoder rows.

        ``(heads, generated tokens except the last, encoder rows)``; None if nothing was stored.
        """
        encoder, first = request.encoder_blocks, request.num_prompt_tokens
        queries = [rows for position, rows in sorted(request.queries.items()) if position >= first]
        if not queries or encoder is None:
            return None
        group_id = self._kv.coordinator.encoder_managers[0].group_id
        block_ids = self._kv.block_ids(request.request_id, group_id)
        sizes = [len(layer.aligned_heads) for layer in self._aligned]
        parts = torch.stack(queries).split(sizes, dim=1)
        found = zip(self._aligned, parts, strict=True)
        return torch.cat([x.shares(part, block_ids, encoder.num_tokens) for x, part in found])

    def _swap_pages(self, output: SchedulerOutput, swap_memory: PagedMemory) -> None:
        """Copy pages in the order of the decisions; see :class:`SchedulerOutput`."""
        try:
            for move in output.page_moves:
                memories = self._memory, swap_memory
                source, target = memories if move.to_host else reversed(memories)
                for copy in move.copies:
                    source.copy_pages(copy, target)
        except Exception as error:  # any error of host or device memory
            raise SwapError(f"swapping failed: {type(error).__name__}: {error}") from error

    def _run_encoder(
        self, step: StepInputs, scheduled: Sequence[ScheduledRequest]
    ) -> Tensor | None:
        """Encode the encoder inputs of this step; return the rows packed in its order, or None."""
        entries = [
            item.request.encoder_input
            for item in scheduled
            if item.runs_encoder and item.request.encoder_input is not None
        ]
        if not entries:
            return None
        if self._deterministic:
            rows = torch.cat([self._model.encode([entry]) for entry in entries])
        else:
            rows = self._model.encode(entries)
        if not are_finite([rows]):
            raise ValueError("the encoder gave rows that are NaN or infinite")
        mirror = self._kv.encoder_outputs
        if mirror is not None:
            group_id = self._kv.coordinator.encoder_managers[0].group_id
            slot_mapping = torch.from_numpy(step.groups[group_id].slot_mapping)
            mirror.write(slot_mapping, self._as_rows({ENCODER_HIDDEN_STATES: rows.cpu()}))
        return rows

    def _mirrored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        mirrors = self._kv.stage_outputs.mirrors
        return self._as_rows({name: rows for name, rows in tensors.items() if mirrors(name)})

    def _as_rows(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert floating-point rows to the dtype of mirrored rows."""
        dtype = self._row_dtype
        if dtype is None:
            return tensors
        return {n: x.to(dtype) if x.is_floating_point() else x for n, x in tensors.items()}

    def _write_outputs(self, step: StepInputs, rows: Mapping[str, Tensor]) -> None:
        """Mirror tensors that are on the host. Publish only after this."""
        slot_mapping = torch.from_numpy(step.groups[self._kv.mirrored_group_id].slot_mapping)
        self._kv.stage_outputs.write(slot_mapping, rows)

    def drawn_rows(self, request: Request) -> dict[str, Tensor]:
        """Return the newest token's row in each output that depends on its codes only."""
        codes = request.codes_of(request.num_tokens - 1, request.num_tokens)
        return self._model.drawn_rows(torch.tensor(codes, device=self._device)) if codes else {}

    @torch.inference_mode()
    def warm_up(self) -> tuple[str, ...]:
        """Run two dummy requests in the null block, to discover output tensors.

        They differ in length, so that a row per request is not mistaken for a row per token.
        Returns the names of all outputs of the model.
        """
        self._batch.add("warm-up 0", [0] * 3)
        self._batch.add("warm-up 1", [0] * 2)
        try:
            step = self._batch.prepare(["warm-up 0", "warm-up 1"], [0, 0], [3, 2])
            with on_device(self._device):
                _, tensors = self._run(step)
                if self._device.type == "cuda":
                    # Pure decode steps use separate kernels, compiled on first use.
                    decodes = self._batch.prepare(["warm-up 0"], [2], [1])
                    for size in reversed((1,) if self._graphs is None else self._graphs.sizes):
                        self._run(decodes, size=size)
                if self._model.vocab_size:
                    self._model.compute_logits(tensors["hidden_states"][:1])
            self._host_copy.start(self._mirrored(tensors))
            self._write_outputs(step, self._host_copy.finish())
            if self._kv.encoder_outputs is not None:
                # Create the store now by writing a row to the null block, so that it is known.
                row = tensors["hidden_states"].new_zeros(1, self._model.encoder_hidden_size).cpu()
                slot = torch.zeros(1, dtype=torch.int64)
                self._kv.encoder_outputs.write(slot, self._as_rows({ENCODER_HIDDEN_STATES: row}))
        finally:
            self._batch.remove("warm-up 0")
            self._batch.remove("warm-up 1")
            self._memory.clear_null_page()
        return tuple(tensors)

    def clear(self) -> None:
        """Forget every request, and rediscover the outputs that the manager mirrors."""
        self._batch.clear()
        self.warm_up()

    @torch.inference_mode()
    def is_finite(self, request: Request) -> bool:
        """Return True if the keys and values in a running request's partial block are finite."""
        index, num_rest = divmod(request.num_computed_tokens, self._kv.block_size)
        if not num_rest:
            return True
        pages = [
            FilledPage(0, group_id, self._kv.block_ids(request.request_id, group_id, index)[0])
            for group_id in self._contents.token_groups
        ]
        with on_device(self._device):
            return self._contents.are_finite(pages)

    def append_token(self, request: Request, token_id: int) -> None:
        """Write the token that was accepted for a request to the tables."""
        self._batch.append_token(request.request_id, token_id)

    def forget(self, request: Request) -> None:
        """Free a request's row; a request without one is ignored."""
        self._batch.remove(request.request_id)

    def forget_all(self) -> None:
        """Free all rows after a failed step, which may have failed while allocating one.

        Requests that hold blocks are written to the tables again when they run next.
        """
        self._batch.clear()

    def _run_towers(
        self, scheduled: Sequence[ScheduledRequest], manager: EncoderCacheManager
    ) -> None:
        """Run the towers for items that this step starts and the pool lacks."""
        items = [entry for item in scheduled for entry in item.items_to_encode]
        if not items:
            return
        at_once = [[entry] for entry in items] if self._deterministic else [items]
        encoded = [rows for some in at_once for rows in self._model.encode_multimodal(some)]
        if not are_finite(encoded):
            # Towers may run several items as one sequence, so the cause is unknown: each request
            # is retried alone.
            kinds = " or ".join(sorted({entry.modality for entry in items}))
            raise ValueError(f"the tower gave rows of {kinds} that are NaN or infinite")
        for entry, rows in zip(items, encoded, strict=True):
            manager.fill(entry, rows)

    def _run(
        self,
        step: StepInputs,
        scheduled: Sequence[ScheduledRequest] = (),
        encoded: Tensor | None = None,
        extra: Mapping[str, NDArray[np.int64]] | None = None,
        size: int = 1,
    ) -> tuple[ModelInputs, Mapping[str, Tensor]]:
        """Run the model, with a graph if possible; return its inputs and its outputs per token.

        Args:
            size: minimum size of a graph.
        """
        # Graphs do not return the queries needed for alignment.
        aligns = self._aligned and any(item.request.is_aligned for item in scheduled)
        graphs = None if aligns else self._graphs
        padded = None if graphs is None else graphs.pad(step, size)
        if graphs is None or padded is None:
            inputs = self._inputs.build(step, scheduled, encoded, extra)
            return inputs, self._forward(inputs)
        inputs = self._inputs.build(padded, scheduled, encoded, extra, graphs.place)
        tensors, num_tokens = graphs.run(inputs), len(step.token_ids)
        return inputs, {name: rows[:num_tokens] for name, rows in tensors.items()}

    def _decode(self, inputs: ModelInputs) -> dict[str, Tensor]:
        """Run a padded step, and clear the null page, to which padding rows write."""
        tensors = self._forward(inputs)
        self._memory.clear_null_page()
        return tensors

    def _forward(self, inputs: ModelInputs) -> dict[str, Tensor]:
        with self._together():
            if self._followers is not None:
                self._followers.send_step(inputs)
            return run_layers(self._model, inputs.embeds, inputs.positions, inputs.step)

    def _together(self) -> AbstractContextManager[None]:
        """Return the context of joint operations with followers, if there are any."""
        return nullcontext() if self._followers is None else self._followers.together()

    def _sample(
        self, hidden_states: Tensor, rows: Tensor, sampling: Sequence[Request]
    ) -> list[SampledToken]:
        """Sample; logits are computed for sampled rows only, as they dominate the cost on a CPU."""
        if not sampling:
            return []
        ends = hidden_states.index_select(0, rows)
        states = [request.next_sampling for request in sampling]
        chosen = self._sampler.sample(self._model.compute_logits(ends), states)
        token_ids = chosen.token_ids
        further: list[tuple[int, ...]] = [()] * len(states)
        if self._model.num_codebooks > 1:
            token_ids, further = self._draw_codes(ends, token_ids, states)
        columns = (token_ids, chosen.logprobs, chosen.errors, further, chosen.judgements)
        return list(starmap(SampledToken, zip(sampling, *columns, strict=True)))

    def _draw_codes(
        self, rows: Tensor, token_ids: Sequence[int | None], states: Sequence[SamplingState]
    ) -> tuple[list[int | None], list[tuple[int, ...]]]:
        """Sample the codes of further codebooks in sequence; return tokens and codes."""
        first = torch.tensor([token_id or 0 for token_id in token_ids], device=self._device)
        size = 1 if self._deterministic else len(rows)
        codes: list[list[int]] = []
        for at in range(0, len(rows), size):
            some = slice(at, at + size)
            draws = FurtherDraws(states[some], self._model.code_sampling)
            codes += self._model.draw_codes(rows[some], first[some], draws).tolist()
        drawn = [
            None if token_id is None else row[0]
            for token_id, row in zip(token_ids, codes, strict=True)
        ]
        return drawn, [tuple(row[1:]) for row in codes]
