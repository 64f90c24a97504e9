"""Tiny caches for tests of the bookkeeping: one full-attention group, sizes one can count."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prefix_cache import (
    BlockHash,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    extend_block_hashes,
)

__all__ = ["hashes_of", "tiny_config"]


def tiny_config(num_blocks: int, block_size: int, num_groups: int = 1) -> KVCacheConfig:
    """Groups of one layer each, alike but for their number of heads."""
    groups = tuple(
        KVCacheGroup(
            (f"layer.{index}",),
            FullAttentionSpec(block_size, num_kv_heads=index + 1, head_dim=2, dtype=torch.float32),
        )
        for index in range(num_groups)
    )
    return KVCacheConfig(num_blocks, groups)


def hashes_of(
    token_ids: Sequence[int], block_size: int, salt: str | None = None
) -> list[BlockHash]:
    """Hashes of the full blocks of a sequence of tokens."""
    hashes: list[BlockHash] = []
    extend_block_hashes(hashes, token_ids, block_size, salt=salt)
    return hashes
