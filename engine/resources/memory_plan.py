"""What an engine reserves, worked out before it is reserved, and reported."""

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
    """Bytes for people: ``1536`` is ``1.5 KiB``."""
    if size < 1024:
        return f"{size} B"
    value, unit = size / 1024, "KiB"
    for larger in ("MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}"


def free_bytes(device: torch.device) -> int:
    """Bytes that can be taken now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available)


class MemoryEstimate(NamedTuple):
    """Bytes that a stage would hold; ``least`` is what must be free for it to start."""

    weights: int
    pages: int
    rows: int
    activations: int
    least: int


def require_memory(tensors: Iterable[Any], device: torch.device, owner: str) -> None:
    """See to it that there is room for tensors before any is made.

    Args:
        tensors: of the sizes and types that will be made; on ``meta``, for they need no memory.
        owner: whose they are, for the message.

    Raises:
        ValueError: there is not enough.
    """
    needed = sum(tensor.nbytes for tensor in tensors)
    free = free_bytes(device)
    if needed > free:
        raise ValueError(
            f"the weights of {owner} take {format_bytes(needed)}, but {device.type} has "
            f"{format_bytes(free)} free"
        )


_SHORT_ROWS = dict.fromkeys(("position_ids", "row_keys", "token_ids", "codes"), 32)
# Tokens of a short context; or an eighth of the longest, where that is less.
_SHORT_CONTEXT = 1024
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class ContextCost:
    """What one request holds at one length, while its last token runs.

    Attributes:
        needed_bytes: of the keys, values and states that this token works with.
        held_bytes: of the pages that these lie in.
        one_size_bytes: of the pages that an allocator with pages of one size would hold.
    """

    num_tokens: int
    needed_bytes: int
    held_bytes: int
    one_size_bytes: int

    @property
    def waste(self) -> float:
        """Share of what is held that is not needed."""
        return 1 - self.needed_bytes / self.held_bytes

    @property
    def one_size_waste(self) -> float:
        """The same for pages of one size."""
        return 1 - self.needed_bytes / self.one_size_bytes


@dataclass(frozen=True, slots=True)
class KVCacheReport:
    """The groups of a cache, and what they cost against pages of one size."""

    config: KVCacheConfig
    costs: tuple[ContextCost, ...]

    @property
    def is_uniform(self) -> bool:
        """Whether there is nothing but full attention in one group."""
        return [type(group.spec) for group in self.config.groups] == [FullAttentionSpec]

    def lines(self) -> list[str]:
        """The report, a line for each group and what follows from them."""
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
    """Work out what requests will hold; reserves nothing.

    Args:
        max_model_len: longest sequence; costs are stated for it, and for a short one.
        num_encoder_tokens: that each request brings along, for cross-attention.
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
    """What an engine reserves.

    Attributes:
        num_blocks: blocks of the pool (with several groups, large pages), the null block included.
        page_bytes: one of these blocks (or large pages).
        stage_output_bytes: per mirrored tensor, the host's ``(num_blocks, block_size, D)`` store.
        attention: the backend that computes attention; None in an engine without a KV cache.
        kv_cache: the groups of layers, and what they cost; None likewise.
        item_pages: what towers' rows may take of the pool, in words; None for a model without.
        swap_bytes: host memory for pages of swapped requests.
        offload: where blocks go that the pool may evict, with their most bytes; None for nowhere.
        stored: how the checkpoint's weights are stored, in words, where that is not how they are
            held.
        num_processes: each of which holds such weights and pages, of its share of the heads.
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
        """The whole pool."""
        return self.num_blocks * self.page_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that the pool holds if all layers keep all tokens; the null block holds none."""
        return (self.num_blocks - 1) * self.block_size

    def describe(self, hidden_size: int, enable_prefix_caching: bool) -> Mapping[str, Any]:
        """The plan for people, beside what else its engine resolved."""
        return {
            "hidden_size": hidden_size,
            "dtype": self.dtype,
            "device": self.device,
            "max_model_len": self.max_model_len,
            "enable_prefix_caching": enable_prefix_caching,
            "memory": self.lines(),
        }

    def lines(self) -> list[str]:
        """The plan for people, a line per reservation."""
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
    """Enough for every seat at full length, within the share of free memory that is allowed.

    On a GPU no less than what a step takes stays free; a CPU's memory is not only this program's.

    Args:
        config: what the user set; a ``num_blocks`` of his is taken as it is, if it fits.
        page_bytes: of a (large) page.
        pages_for: pages that sequences of so many tokens, and so many of them, can take up.

    Raises:
        ValueError: the blocks take more memory than is free, or not even one sequence of
            ``max_model_len`` would fit; says what would. Where the user stated ``num_blocks`` and
            no length, the checkpoint's may be too long: requests that do not fit are refused one by
            one then, as long as there is room for any.
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
    """Before anything is made for each of them: a machine may come down by as much as that."""
    if num_pages * page_bytes > free:
        raise ValueError(
            f"num_blocks {num_pages} of {format_bytes(page_bytes)} each take "
            f"{format_bytes(num_pages * page_bytes)}, but {device.type} has {format_bytes(free)} "
            f"free; set num_blocks to at most {free // page_bytes}, or leave it out for "
            f"memory_fraction {memory_fraction} of that"
        )


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """What a loaded model asks of the memory.

    Attributes:
        max_encoder_len: most encoder tokens that a sequence may bring.
        step_bytes: what a step takes beside weights and pages; see :func:`step_bytes`.
        row_bytes: of a token's hidden state.
        item_row_bytes: of a row of images and the like; 0 for a model without towers.
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
        """The same config with pages for towers' rows, if the model has towers."""
        if not self.item_row_bytes:
            return kv_config
        nbytes = config.block_size * self.item_row_bytes
        return kv_config.with_item_pages(nbytes, config.encoder_cache_bytes)

    def page_costs(self, config: EngineConfig) -> tuple[int, Callable[[int, int], int]]:
        """Bytes of a (large) page, and how many so many tokens of so many requests take up."""
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
        """What all seats take at full length, and what one needs; ids and places are short rows."""
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


# Rows of the hidden size that lie beside each other in a layer at most: the residual, what was
# normalized, a fused gate and up of some five times the width each, and their product.
_ROWS_PER_TOKEN = 24
# Per logit: the model's, a copy that penalties change, and four of float64 to draw from.
_BYTES_PER_LOGIT = 4 + 4 + 4 * 8


def step_bytes(config: EngineConfig, hidden_size: int, vocab_size: int, dtype: torch.dtype) -> int:
    """What the largest step takes on a device beside weights and pages, by rule of thumb."""
    per_token = _ROWS_PER_TOKEN * hidden_size * dtype.itemsize
    per_request = _BYTES_PER_LOGIT * vocab_size
    return config.max_num_batched_tokens * per_token + config.max_num_seqs * per_request


def plan_memory(
    config: EngineConfig, needs: ModelNeeds, *, device: torch.device, attention: str
) -> tuple[KVCacheConfig, MemoryPlan]:
    """Size the pool; ``attention`` is the backend's name, for the plan.

    A pool that the user sized himself need not hold ``needs.max_encoder_len`` encoder tokens for
    every sequence, nor the longest item: requests that do not fit are refused one by one.

    Raises:
        ValueError: the memory that may be used does not hold one sequence; says what would fit.
    """
    max_model_len = needs.max_model_len
    page_bytes, pages_for = needs.page_costs(config)
    kv_config = KVCacheConfig(
        resolve_num_blocks(config, page_bytes, pages_for, max_model_len, device, needs.step_bytes),
        needs.groups,
        # Host memory is taken as it is written to, so there is room for every seat.
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
    size, most = config.item_page_bytes, config.max_item_pages
    bound = "" if most is None else f"up to {format_bytes(most * size)} "
    return f"{bound}of the KV cache, in pages of {format_bytes(size)}, as rows are needed"
