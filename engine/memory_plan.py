"""What an engine reserves, worked out before it is reserved and told to people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import psutil
import torch

from engine.config import EngineConfig
from prefix_cache import KVCacheConfig, KVCacheGroup

__all__ = ["MemoryPlan", "format_bytes", "plan_memory", "resolve_num_blocks"]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What an engine reserves.

    Attributes:
        device: where weights and pages are.
        dtype: element type of both.
        weights_bytes: the model.
        num_blocks: blocks of the pool, the null block included.
        block_size: tokens per block.
        page_bytes: one block, all layers of its group.
        groups: per KV-cache group, a line for people.
        max_model_len: longest sequence.
        stage_output_bytes: per mirrored tensor, the whole ``(num_blocks, block_size, D)`` store
            on the host.
        attention: the backend that computes attention; None in an engine without a KV cache.
    """

    device: str
    dtype: str
    weights_bytes: int
    num_blocks: int
    block_size: int
    page_bytes: int
    groups: tuple[str, ...]
    max_model_len: int
    stage_output_bytes: Mapping[str, int] = field(default_factory=dict)
    attention: str | None = None

    @property
    def kv_cache_bytes(self) -> int:
        """The whole pool."""
        return self.num_blocks * self.page_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that the pool holds; the null block holds none."""
        return (self.num_blocks - 1) * self.block_size

    def with_stage_outputs(self, nbytes: Mapping[str, int]) -> MemoryPlan:
        """The same plan, told what the stage-output cache has reserved."""
        return replace(self, stage_output_bytes=dict(nbytes))

    def lines(self) -> list[str]:
        """The plan for people, a line per reservation."""
        return [
            f"weights        {format_bytes(self.weights_bytes)} ({self.dtype} on {self.device})",
            *(
                [
                    f"KV cache       {format_bytes(self.kv_cache_bytes)}: {self.num_blocks} "
                    f"blocks of {self.block_size} tokens, {format_bytes(self.page_bytes)} each",
                    f"  room         {self.num_tokens} tokens; sequences up to "
                    f"{self.max_model_len}",
                ]
                if self.page_bytes
                else [
                    f"blocks         {self.num_blocks} of {self.block_size} tokens "
                    f"({self.num_tokens} tokens; inputs up to {self.max_model_len})"
                ]
            ),
            *(f"  group        {line}" for line in self.groups),
            *([f"attention      {self.attention}"] if self.attention else []),
            *(
                f"stage output   {format_bytes(size)} host memory for {name}"
                for name, size in self.stage_output_bytes.items()
            ),
        ]


def format_bytes(size: int) -> str:
    """Bytes for people: ``1536`` is ``1.5 KiB``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available)


def resolve_num_blocks(
    config: EngineConfig, page_bytes: int, max_model_len: int, device: torch.device
) -> int:
    """Enough for every seat at full length, within the share of free memory that is allowed.

    Raises:
        ValueError: not even one sequence of ``max_model_len`` would fit.
    """
    blocks_per_sequence = -(-max_model_len // config.block_size)
    if config.num_blocks is not None:
        return config.num_blocks
    budget = int(_free_bytes(device) * config.memory_fraction)
    num_blocks = min(blocks_per_sequence * config.max_num_seqs + 1, budget // page_bytes)
    if num_blocks <= blocks_per_sequence:
        fits = max(num_blocks - 1, 0) * config.block_size
        raise ValueError(
            f"max_model_len {max_model_len} needs {blocks_per_sequence} blocks of "
            f"{format_bytes(page_bytes)}, but memory_fraction {config.memory_fraction} of the free "
            f"memory ({format_bytes(budget)}) holds {max(num_blocks - 1, 0)}; "
            f"max_model_len {fits} would fit, or raise memory_fraction"
        )
    return num_blocks


def plan_memory(
    config: EngineConfig,
    groups: tuple[KVCacheGroup, ...],
    *,
    weights_bytes: int,
    max_model_len: int,
    device: torch.device,
    dtype: torch.dtype,
    attention: str,
) -> tuple[KVCacheConfig, MemoryPlan]:
    """Size the pool; ``attention`` is the backend's name, for the plan.

    Raises:
        ValueError: the memory that may be used does not hold one sequence; says what would fit.
    """
    page_bytes = max(group.page_bytes for group in groups)
    kv_config = KVCacheConfig(
        num_blocks=resolve_num_blocks(config, page_bytes, max_model_len, device), groups=groups
    )
    plan = MemoryPlan(
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        weights_bytes=weights_bytes,
        num_blocks=kv_config.num_blocks,
        block_size=config.block_size,
        page_bytes=page_bytes,
        groups=tuple(
            f"{len(group.layer_names)} layers of {type(group.spec).__name__}, "
            f"{format_bytes(group.page_bytes)} a page"
            for group in groups
        ),
        max_model_len=max_model_len,
        attention=attention,
    )
    return kv_config, plan
