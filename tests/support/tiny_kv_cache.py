"""Tiny caches for tests of block accounting: countable sizes, groups of every kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from prefix_cache import (
    BlockHash,
    BlockPool,
    CrossAttentionSpec,
    FullAttentionSpec,
    HostOnlySpec,
    KVCacheBlock,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    StateTensor,
    extend_block_hashes,
)

GROUP_MIXES: dict[str, dict[str, int]] = {
    "full": {"full": 1},
    "three_full": {"full": 2, "full ": 3, "full  ": 5},
    "gemma": {"full": 2, "sliding": 3},
    "ministral": {"sliding": 3, "host": 1},
    "jamba": {"full": 2, "mamba": 3},
    "mamba": {"mamba": 1, "host": 1},
    "mllama": {"cross": 2, "full": 3},
    "all": {"cross": 2, "sliding": 3, "full": 5, "mamba": 2, "host": 1},
}
"""Kinds of layers that occur together in one model, with their numbers of layers."""


def tiny_config(num_blocks: int, block_size: int) -> KVCacheConfig:
    """Return one full-attention group of one layer: a large page is a block."""
    return mixed_config({"full": 1}, num_blocks, block_size)


def mixed_config(
    layers: Mapping[str, int],
    num_large_pages: int,
    block_size: int,
    *,
    reach: int = 5,
    num_host_blocks: int = 0,
) -> KVCacheConfig:
    """Return one group per kind of layer; every layer's page has ``8 * block_size`` bytes."""
    groups = tuple(
        KVCacheGroup(
            tuple(f"{kind}.{index}" for index in range(count)),
            _spec(kind.strip(), block_size, reach),
        )
        for kind, count in layers.items()
    )
    return KVCacheConfig(num_large_pages, groups, num_host_blocks or 64 * num_large_pages)


def _spec(kind: str, block_size: int, reach: int) -> KVCacheSpec:
    attention = (block_size, 1, 1, torch.float32)
    match kind:
        case "full":
            return FullAttentionSpec(*attention)
        case "cross":
            return CrossAttentionSpec(*attention)
        case "sliding":
            return SlidingWindowSpec(*attention, window=reach)
        case "mamba":
            return MambaSpec(block_size, (StateTensor((2 * block_size,), torch.float32),))
        case "host":
            return HostOnlySpec(block_size)
    raise ValueError(f"no kind of layer {kind!r}")


def hashes_of(
    token_ids: Sequence[int], block_size: int, salt: str | None = None
) -> list[BlockHash]:
    """Return hashes of the full blocks of a sequence of tokens."""
    hashes: list[BlockHash] = []
    extend_block_hashes(hashes, token_ids, block_size, salt=salt)
    return hashes


def cached_ids(pool: BlockPool, group_id: int = 0) -> list[int]:
    """Return a group's unreferenced cached blocks in order of eviction."""
    (group,) = (arena.groups[group_id] for arena in pool.arenas if group_id in arena.groups)
    return [block.block_id for block in group.cached]


def held_block(pool: BlockPool, block_id: int, group_id: int = 0) -> KVCacheBlock:
    """Return the block with an id, held or cached."""
    blocks = (block for arena in pool.arenas for page in arena.pages for block in page.blocks)
    (found,) = (b for b in blocks if (b.block_id, b.group_id) == (block_id, group_id))
    return found
