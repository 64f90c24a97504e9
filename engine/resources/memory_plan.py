"""Memory plan: sizes of an engine's reservations, computed in advance and reported."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import psutil
import torch

from engine.interface.config import EngineConfig, OffloadSettings
from engine.resources.device import resolve_device
from prefix_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheManager,
    MambaSpec,
    needed_bytes,
    one_size_groups,
    request_bytes,
    spec_in_words,
)


def format_bytes(size: int) -> str:
    """Format a number of bytes: ``1536`` is ``1.5 KiB``."""
    if size < 1024:
        return f"{size} B"
    value, unit = size / 1024, "KiB"
    for larger in ("MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}"


def free_bytes(device: torch.device) -> int:
    """Return the bytes that are currently available on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available)


class MemoryEstimate(NamedTuple):
    """Bytes that a stage would use; ``least`` is the minimum that must be free for it to start."""

    weights: int
    pages: int
    rows: int
    activations: int
    least: int


def require_memory(tensors: Iterable[Any], device: torch.device, owner: str) -> None:
    """Check that there is enough memory for tensors before any is allocated.

    Args:
        tensors: ``meta`` tensors, which need no memory, of the sizes and dtypes to allocate.
        owner: owner of the tensors, for the message.

    Raises:
        ValueError: if there is not enough.
    """
    needed = sum(tensor.nbytes for tensor in tensors)
    free = free_bytes(device)
    if needed > free:
        raise ValueError(
            f"the weights of {owner} take {format_bytes(needed)}, but {device.type} has "
            f"{format_bytes(free)} free"
        )


_SHORT_ROWS = dict.fromkeys(("position_ids", "row_keys", "token_ids", "codes"), 32)
# Tokens of a short context, or an eighth of the longest if that is less.
_SHORT_CONTEXT = 1024
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class ContextCost:
    """Memory that one request holds at one length, while its last token runs.

    Attributes:
        needed_bytes: bytes of the keys, values and states that this token uses.
        held_bytes: bytes of the pages that contain them.
        one_size_bytes: bytes of the pages that an allocator with one page size would hold.
    """

    num_tokens: int
    needed_bytes: int
    held_bytes: int
    one_size_bytes: int

    @property
    def waste(self) -> float:
        """Fraction of the held bytes that is not needed."""
        return 1 - self.needed_bytes / self.held_bytes

    @property
    def one_size_waste(self) -> float:
        """Fraction of the bytes held with one page size that is not needed."""
        return 1 - self.needed_bytes / self.one_size_bytes


@dataclass(frozen=True, slots=True)
class KVCacheReport:
    """Groups of a cache, and their cost compared with a single page size."""

    config: KVCacheConfig
    costs: tuple[ContextCost, ...]

    @property
    def is_uniform(self) -> bool:
        """True if the only group is one of full attention."""
        return [type(group.spec) for group in self.config.groups] == [FullAttentionSpec]

    def lines(self) -> list[str]:
        """Format the report: one line per group, and the resulting costs."""
        if self.is_uniform:
            group = self.config.groups[0]
            page_bytes, block_size = group.page_bytes, group.spec.block_size
            return [
                f"  group        {_layers(group)}, {spec_in_words(group.spec)}: "
                f"{format_bytes(page_bytes)} a page of {block_size} tokens, "
                f"{_GIB // page_bytes} in a GiB",
                f"  per token    {format_bytes(page_bytes // block_size)} at every length",
            ]
        short, long = self.costs[0], self.costs[-1]
        per_token = dict.fromkeys(
            f"{format_bytes(cost.held_bytes // cost.num_tokens)} at {cost.num_tokens} tokens"
            for cost in self.costs
        )
        wastes = dict.fromkeys(
            f"{cost.one_size_waste:.1%} at {cost.num_tokens} tokens (here {cost.waste:.1%})"
            for cost in (short, long)
        )
        return [
            *(f"  group        {self._group_line(i)}" for i in range(len(self.config.groups))),
            f"  per token    {', '.join(per_token)}, of one request",
            f"  one size     would hold "
            f"{format_bytes(long.one_size_bytes // long.num_tokens)} at {long.num_tokens} tokens; "
            f"wasted: {', '.join(wastes)}",
        ]

    def _group_line(self, group_id: int) -> str:
        group = self.config.groups[group_id]
        spec = group.spec
        if not group.on_device:
            return f"no layers, on the host: {self.config.num_host_blocks} blocks for outputs"
        kind = spec_in_words(spec)
        holds = "one state" if isinstance(spec, MambaSpec) else f"{spec.block_size} tokens"
        padding = f", {format_bytes(group.padding_bytes)} of it padding" * bool(group.padding_bytes)
        return (
            f"{_layers(group)}, {kind}: {format_bytes(group.page_bytes)} a page of "
            f"{holds}{padding}; {self.config.pages_per_large_page(group_id)} in a large page, "
            f"{_GIB // group.page_bytes} in a GiB"
        )


def report_kv_cache(
    config: KVCacheConfig, max_model_len: int, num_encoder_tokens: int = 0
) -> KVCacheReport:
    """Compute how much memory requests will hold; reserves nothing.

    Args:
        max_model_len: longest sequence; costs are reported for it and for a short one.
        num_encoder_tokens: encoder tokens of each request, for cross-attention.
    """
    ours = _probe(config.groups)
    one_size = _probe(one_size_groups(config.groups))
    lengths = sorted({min(_SHORT_CONTEXT, -(-max_model_len // 8)), max_model_len})
    costs = tuple(
        ContextCost(
            n,
            needed_bytes(config.groups, n, num_encoder_tokens),
            request_bytes(ours, n, num_encoder_tokens),
            request_bytes(one_size, n, num_encoder_tokens),
        )
        for n in lengths
    )
    return KVCacheReport(config, costs)


def _probe(groups: tuple[KVCacheGroup, ...]) -> KVCacheManager:
    return KVCacheManager(KVCacheConfig(2, groups, num_host_blocks=2))


def _layers(group: KVCacheGroup) -> str:
    count = len(group.layer_names)
    return f"{count} layer{'s' * (count != 1)}"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Reservations of an engine.

    Attributes:
        num_blocks: blocks of the pool (large pages with several groups), including the null block.
        page_bytes: size of one block (or large page).
        stage_output_bytes: per mirrored tensor, the host's ``(num_blocks, block_size, D)`` store.
        attention: name of the attention backend; None in an engine without a KV cache.
        kv_cache: groups of layers and their cost; None in an engine without a KV cache.
        item_pages: share of the pool for tower rows, in words; None for a model without towers.
        swap_bytes: host memory for pages of swapped requests.
        offload: tiers for blocks that the pool may evict, with their capacities; None if disabled.
        stored: storage format of the checkpoint's weights, in words, if it differs from that in
            memory.
        num_processes: number of processes, each with these weights and pages for its heads.
    """

    device: str
    dtype: str
    weights_bytes: int
    num_blocks: int
    block_size: int
    page_bytes: int
    max_model_len: int
    stage_output_bytes: Mapping[str, int] = field(default_factory=dict)
    attention: str | None = None
    kv_cache: KVCacheReport | None = None
    item_pages: str | None = None
    swap_bytes: int = 0
    offload: OffloadSettings | None = None
    stored: str | None = None
    num_processes: int = 1

    @property
    def kv_cache_bytes(self) -> int:
        """Size of the whole pool."""
        return self.num_blocks * self.page_bytes

    @property
    def num_tokens(self) -> int:
        """Token capacity of the pool if all layers keep all tokens, without the null block."""
        return (self.num_blocks - 1) * self.block_size

    def describe(self, hidden_size: int, enable_prefix_caching: bool) -> Mapping[str, Any]:
        """Return the formatted plan together with other settings that the engine resolved."""
        return {
            "hidden_size": hidden_size,
            "dtype": self.dtype,
            "device": self.device,
            "max_model_len": self.max_model_len,
            "enable_prefix_caching": enable_prefix_caching,
            "memory": self.lines(),
        }

    def lines(self) -> list[str]:
        """Format the plan, one line per reservation."""
        return [
            f"weights        {format_bytes(self.weights_bytes)} ({self.dtype} on {self.device})",
            *([f"  stored as    {self.stored}"] if self.stored else []),
            *self._pool_lines(),
            *(self.kv_cache.lines() if self.kv_cache else []),
            *self._further_lines(),
        ]

    def _further_lines(self) -> Iterator[str]:
        if self.num_processes > 1:
            yield f"divided among  {self.num_processes} processes, of which each takes as much"
        if self.attention:
            yield f"attention      {self.attention}"
        if self.item_pages:
            yield f"encoder cache  {self.item_pages}"
        if self.swap_bytes:
            yield f"swap space     {format_bytes(self.swap_bytes)} host memory"
        if self.offload is not None and self.offload.host_bytes is not None:
            yield f"offload        up to {format_bytes(self.offload.host_bytes)} host memory"
        if self.offload is not None and self.offload.disk is not None:
            disk = self.offload.disk
            yield f"offload        up to {format_bytes(disk.bytes)} on disk in {disk.path}"
        for name, nbytes in self.stage_output_bytes.items():
            yield f"stage output   {format_bytes(nbytes)} host memory for {name}"

    def _pool_lines(self) -> list[str]:
        if self.kv_cache is None:
            return [
                f"blocks         {self.num_blocks} of {self.block_size} tokens "
                f"({self.num_tokens} tokens; inputs up to {self.max_model_len})"
            ]
        total, page = format_bytes(self.kv_cache_bytes), format_bytes(self.page_bytes)
        if self.kv_cache.is_uniform:
            return [
                f"KV cache       {total}: {self.num_blocks} blocks of {self.block_size} tokens, "
                f"{page} each",
                f"  room         {self.num_tokens} tokens; sequences up to {self.max_model_len}",
            ]
        longest = self.kv_cache.costs[-1]
        usable = self.kv_cache_bytes - self.page_bytes
        return [
            f"KV cache       {total}: {self.num_blocks} large pages, {page} each",
            f"  room         for the pages of {usable / longest.held_bytes:.1f} sequences of "
            f"{longest.num_tokens} tokens",
        ]


def resolve_num_blocks(
    config: EngineConfig,
    page_bytes: int,
    pages_for: Callable[[int, int], int],
    max_model_len: int,
    device: torch.device,
    step_bytes: int = 0,
) -> int:
    """Return enough blocks for every seat at full length, within the allowed share of free memory.

    On a GPU, at least a step's memory stays free; a CPU's memory is shared with other programs.

    Args:
        config: the user's settings; an explicit ``num_blocks`` is used unchanged, if it fits.
        page_bytes: size of a (large) page.
        pages_for: maximum number of pages for a length in tokens and a number of sequences.

    Raises:
        ValueError: if the blocks exceed the free memory, or not even one sequence of
            ``max_model_len`` would fit; the message suggests what would. If the user set
            ``num_blocks`` but no length, the checkpoint's may be too long: requests that do not
            fit are then rejected one by one, as long as there is room for any.
    """
    per_sequence = pages_for(max_model_len, 1)
    # Processes that share a CPU take as much each.
    free = free_bytes(device) // (config.tensor_parallel if device.type == "cpu" else 1)
    if config.num_blocks is None:
        budget = int(free * config.memory_fraction)
        limit = f"memory_fraction {config.memory_fraction} of the free memory "
        limit += f"({format_bytes(budget)})"
        remedy = "raise memory_fraction"
        if device.type != "cpu" and free - step_bytes < budget:
            budget = max(free - step_bytes, 0)
            limit = f"the free memory but for {format_bytes(step_bytes)} that a step takes "
            limit += f"({format_bytes(budget)})"
            remedy = "lower max_num_batched_tokens or max_num_seqs"
        wanted = pages_for(max_model_len, config.max_num_seqs) + 1
        num_pages = min(wanted, budget // page_bytes)
    else:
        num_pages = config.num_blocks
        _check_free(num_pages, page_bytes, config.memory_fraction, device, free)
        limit = f"num_blocks {num_pages}, the null block off,"
        remedy = f"set num_blocks to at least {per_sequence + 1}"
    room = max(num_pages - 1, 0)
    is_stated = config.num_blocks is None or config.max_model_len is not None
    if pages_for(max_model_len if is_stated else 1, 1) > room:
        fits = bisect_right(range(max_model_len), room, key=lambda n: pages_for(n + 1, 1))
        raise ValueError(
            f"max_model_len {max_model_len} needs {per_sequence} blocks of "
            f"{format_bytes(page_bytes)}, but {limit} holds {room}; "
            + (f"max_model_len {fits} would fit, or " if fits else "not one token would fit: ")
            + remedy
        )
    return num_pages


def _check_free(
    num_pages: int, page_bytes: int, memory_fraction: float, device: torch.device, free: int
) -> None:
    """Check the free memory before allocating anything per page, which could crash the machine."""
    if num_pages * page_bytes > free:
        raise ValueError(
            f"num_blocks {num_pages} of {format_bytes(page_bytes)} each take "
            f"{format_bytes(num_pages * page_bytes)}, but {device.type} has {format_bytes(free)} "
            f"free; set num_blocks to at most {free // page_bytes}, or leave it out for "
            f"memory_fraction {memory_fraction} of that"
        )


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """Memory requirements of a loaded model.

    Attributes:
        max_encoder_len: maximum number of encoder tokens per sequence.
        step_bytes: memory of a step besides weights and pages; see :func:`step_bytes`.
        row_bytes: size of a token's hidden state.
        item_row_bytes: size of a row of a multimodal item; 0 for a model without towers.
    """

    groups: tuple[KVCacheGroup, ...]
    weights_bytes: int
    dtype: torch.dtype
    max_model_len: int
    max_encoder_len: int = 0
    row_bytes: int = 0
    item_row_bytes: int = 0
    step_bytes: int = 0

    def with_item_pages(self, kv_config: KVCacheConfig, config: EngineConfig) -> KVCacheConfig:
        """Return the config with pages for tower rows, if the model has towers."""
        if not self.item_row_bytes:
            return kv_config
        nbytes = config.block_size * self.item_row_bytes
        return kv_config.with_item_pages(nbytes, config.encoder_cache_bytes)

    def page_costs(self, config: EngineConfig) -> tuple[int, Callable[[int, int], int]]:
        """Return the size of a (large) page, and a function from (tokens, requests) to pages."""
        probe = KVCacheManager(
            self.with_item_pages(KVCacheConfig(2, self.groups, num_host_blocks=2), config),
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        is_open, num_encoder_tokens = config.num_blocks is None, self.max_encoder_len

        def pages_for(num_tokens: int, num_requests: int) -> int:
            item_bytes = num_tokens * self.item_row_bytes
            longest_item = min(item_bytes, config.encoder_cache_bytes or item_bytes)
            of_items = probe.config.item_pages(longest_item * is_open)
            of_encoder = num_encoder_tokens if is_open else min(num_encoder_tokens, 1)
            return probe.pages_for(num_tokens, of_encoder, num_requests, of_items)

        return probe.config.large_page_bytes, pages_for

    def estimate(self, config: EngineConfig, outputs: Collection[str]) -> MemoryEstimate:
        """Estimate the memory of all seats at full length, and the minimum for one of them."""
        page_bytes, pages_for = self.page_costs(config)
        stated, length, num_seqs = config.num_blocks, self.max_model_len, config.max_num_seqs
        first, pages = (page_bytes * (stated or pages_for(length, n) + 1) for n in (1, num_seqs))
        share = config.memory_fraction if stated is None else 1
        least = self.weights_bytes + self.step_bytes + int(first / share)
        num_tokens = length * num_seqs if stated is None else stated * config.block_size
        rows = num_tokens * sum(_SHORT_ROWS.get(name, self.row_bytes) for name in outputs)
        # Processes that share a CPU take as much each.
        copies = config.tensor_parallel if resolve_device(config.device).type == "cpu" else 1
        return MemoryEstimate(
            copies * self.weights_bytes, copies * pages, rows, self.step_bytes, copies * least
        )


# Maximum number of rows of the hidden size that coexist in a layer: the residual, the normalized
# input, a fused gate and up projection of about five times the width each, and their product.
_ROWS_PER_TOKEN = 24
# Per logit: the model's, a copy that penalties change, and four float64 copies for sampling.
_BYTES_PER_LOGIT = 4 + 4 + 4 * 8


def step_bytes(config: EngineConfig, hidden_size: int, vocab_size: int, dtype: torch.dtype) -> int:
    """Estimate the device memory of the largest step besides weights and pages."""
    per_token = _ROWS_PER_TOKEN * hidden_size * dtype.itemsize
    per_request = _BYTES_PER_LOGIT * vocab_size
    return config.max_num_batched_tokens * per_token + config.max_num_seqs * per_request


def plan_memory(
    config: EngineConfig, needs: ModelNeeds, *, device: torch.device, attention: str
) -> tuple[KVCacheConfig, MemoryPlan]:
    """Size the pool; ``attention`` is the backend's name, for the plan.

    A pool of user-defined size need not hold ``needs.max_encoder_len`` encoder tokens for every
    sequence, nor the longest item: requests that do not fit are rejected one by one.

    Raises:
        ValueError: if not even one sequence fits; the message suggests what would.
    """
    max_model_len = needs.max_model_len
    page_bytes, pages_for = needs.page_costs(config)
    kv_config = KVCacheConfig(
        resolve_num_blocks(config, page_bytes, pages_for, max_model_len, device, needs.step_bytes),
        needs.groups,
        # Host memory is committed only when it is written, so reserve enough for every seat.
        num_host_blocks=-(-max_model_len // config.block_size) * config.max_num_seqs + 1,
    )
    kv_config = needs.with_item_pages(kv_config, config)
    plan = MemoryPlan(
        device=str(device),
        dtype=str(needs.dtype).removeprefix("torch."),
        weights_bytes=needs.weights_bytes,
        num_blocks=kv_config.num_large_pages,
        block_size=config.block_size,
        page_bytes=page_bytes,
        max_model_len=max_model_len,
        attention=attention,
        kv_cache=report_kv_cache(kv_config, max_model_len, needs.max_encoder_len),
        item_pages=_item_pages(kv_config),
        num_processes=config.tensor_parallel,
    )
    return kv_config, plan


def _item_pages(config: KVCacheConfig) -> str | None:
    if not config.item_page_bytes:
        return None
    size, max_pages = config.item_page_bytes, config.max_item_pages
    bound = "" if max_pages is None else f"up to {format_bytes(max_pages * size)} "
    return f"{bound}of the KV cache, in pages of {format_bytes(size)}, as rows are needed"
