"""Remembers what was computed: blocks, their content, and the outputs mirrored beside them.

Imports torch and nothing of the project: it knows ids, hashes, sizes and tensors, but no model, no
tokenizer and no request queue.
"""

from __future__ import annotations

from prefix_cache.blocks.block import (
    BlockHash,
    ContentSpan,
    IntegrityError,
    KVCacheBlock,
    LargePage,
    content_hash,
    extend_block_hashes,
    partial_block_hash,
    whole_input_block_hashes,
    whole_input_hash,
)
from prefix_cache.blocks.block_pool import BlockPool, PageArena
from prefix_cache.kv_cache.integrity import (
    check_integrity,
    check_pool_integrity,
    needed_bytes,
    one_size_groups,
    request_bytes,
)
from prefix_cache.kv_cache.kv_cache_manager import (
    ENCODER_HIDDEN_STATES,
    CachedPrefix,
    EncoderBlocks,
    KVCacheManager,
    PendingBlocks,
)
from prefix_cache.kv_cache.kv_cache_stats import GroupStats, KVCacheStats, PrefixMiss
from prefix_cache.kv_cache.offloaded_blocks import OffloadedBlocks
from prefix_cache.kv_cache.swap_space import SwapSpace
from prefix_cache.layer_types.coordinator import (
    MANAGER_TYPES,
    ChunkStops,
    CrossAttentionManager,
    FullAttentionManager,
    KVCacheCoordinator,
    MambaManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)
from prefix_cache.specs.kv_cache_spec import (
    AttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HostOnlySpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    StateTensor,
    group_layers,
    pad_pages,
    spec_in_words,
)
from prefix_cache.stores.offload_tiers import DiskTier, HostTier, OffloadStats
from prefix_cache.stores.paged_memory import LayerKVCache, PageCopy, PagedMemory
from prefix_cache.stores.stage_output_cache import StageOutputCache
from prefix_cache.stores.whole_input_cache import WholeInputCache

__all__ = [
    "ENCODER_HIDDEN_STATES",
    "MANAGER_TYPES",
    "AttentionSpec",
    "BlockHash",
    "BlockPool",
    "CachedPrefix",
    "ChunkStops",
    "ContentSpan",
    "CrossAttentionManager",
    "CrossAttentionSpec",
    "DiskTier",
    "EncoderBlocks",
    "FullAttentionManager",
    "FullAttentionSpec",
    "GroupStats",
    "HostOnlySpec",
    "HostTier",
    "IntegrityError",
    "KVCacheBlock",
    "KVCacheConfig",
    "KVCacheCoordinator",
    "KVCacheGroup",
    "KVCacheManager",
    "KVCacheSpec",
    "KVCacheStats",
    "LargePage",
    "LayerKVCache",
    "MambaManager",
    "MambaSpec",
    "OffloadStats",
    "OffloadedBlocks",
    "PageArena",
    "PageCopy",
    "PagedMemory",
    "PendingBlocks",
    "PrefixMiss",
    "SingleTypeKVCacheManager",
    "SlidingWindowManager",
    "SlidingWindowSpec",
    "StageOutputCache",
    "StateTensor",
    "SwapSpace",
    "WholeInputCache",
    "check_integrity",
    "check_pool_integrity",
    "content_hash",
    "extend_block_hashes",
    "group_layers",
    "needed_bytes",
    "one_size_groups",
    "pad_pages",
    "partial_block_hash",
    "request_bytes",
    "spec_in_words",
    "whole_input_block_hashes",
    "whole_input_hash",
]
