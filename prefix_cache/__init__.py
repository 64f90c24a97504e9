"""Remembers what was computed: blocks, their content, and the outputs mirrored beside them.

Knows no model, no tokenizer and no request queue: ids, hashes, sizes and tensors only.
"""

from __future__ import annotations

from prefix_cache.block import FreeBlockQueue, KVCacheBlock
from prefix_cache.block_hash import (
    BlockHash,
    ContentSpan,
    content_hash,
    extend_block_hashes,
    whole_input_hash,
)
from prefix_cache.block_pool import BlockPool
from prefix_cache.coordinator import MANAGER_TYPES, KVCacheCoordinator
from prefix_cache.full_attention_manager import FullAttentionManager
from prefix_cache.integrity import IntegrityError, check_integrity, check_pool_integrity
from prefix_cache.kv_cache_manager import CachedPrefix, KVCacheManager, KVCacheStats
from prefix_cache.kv_cache_spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    group_layers,
)
from prefix_cache.paged_memory import LayerKVCache, PagedMemory
from prefix_cache.pending_blocks import PendingBlocks
from prefix_cache.single_type_manager import SingleTypeKVCacheManager
from prefix_cache.stage_output_cache import StageOutputCache, StageOutputCacheStats
from prefix_cache.whole_input_cache import WholeInputCache

__all__ = [
    "MANAGER_TYPES",
    "BlockHash",
    "BlockPool",
    "CachedPrefix",
    "ContentSpan",
    "FreeBlockQueue",
    "FullAttentionManager",
    "FullAttentionSpec",
    "IntegrityError",
    "KVCacheBlock",
    "KVCacheConfig",
    "KVCacheCoordinator",
    "KVCacheGroup",
    "KVCacheManager",
    "KVCacheSpec",
    "KVCacheStats",
    "LayerKVCache",
    "PagedMemory",
    "PendingBlocks",
    "SingleTypeKVCacheManager",
    "StageOutputCache",
    "StageOutputCacheStats",
    "WholeInputCache",
    "check_integrity",
    "check_pool_integrity",
    "content_hash",
    "extend_block_hashes",
    "group_layers",
    "whole_input_hash",
]
