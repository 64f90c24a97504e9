"""Prefix cache: KV-cache blocks, their content hashes, and stage outputs mirrored by block id.

Imports torch and nothing from the rest of the project: it handles ids, hashes, sizes and tensors,
but no model, no tokenizer and no request queue.
"""

from __future__ import annotations

from prefix_cache.blocks.block import BlockHash as BlockHash
from prefix_cache.blocks.block import ContentSpan as ContentSpan
from prefix_cache.blocks.block import IntegrityError as IntegrityError
from prefix_cache.blocks.block import KVCacheBlock as KVCacheBlock
from prefix_cache.blocks.block import LargePage as LargePage
from prefix_cache.blocks.block import content_hash as content_hash
from prefix_cache.blocks.block import extend_block_hashes as extend_block_hashes
from prefix_cache.blocks.block import partial_block_hash as partial_block_hash
from prefix_cache.blocks.block import whole_input_block_hashes as whole_input_block_hashes
from prefix_cache.blocks.block import whole_input_hash as whole_input_hash
from prefix_cache.blocks.block_pool import BlockPool as BlockPool
from prefix_cache.blocks.block_pool import PageArena as PageArena
from prefix_cache.kv_cache.integrity import check_integrity as check_integrity
from prefix_cache.kv_cache.integrity import check_pool_integrity as check_pool_integrity
from prefix_cache.kv_cache.integrity import needed_bytes as needed_bytes
from prefix_cache.kv_cache.integrity import one_size_groups as one_size_groups
from prefix_cache.kv_cache.integrity import request_bytes as request_bytes
from prefix_cache.kv_cache.kv_cache_manager import ENCODER_HIDDEN_STATES as ENCODER_HIDDEN_STATES
from prefix_cache.kv_cache.kv_cache_manager import CachedPrefix as CachedPrefix
from prefix_cache.kv_cache.kv_cache_manager import EncoderBlocks as EncoderBlocks
from prefix_cache.kv_cache.kv_cache_manager import KVCacheManager as KVCacheManager
from prefix_cache.kv_cache.kv_cache_manager import PendingBlocks as PendingBlocks
from prefix_cache.kv_cache.kv_cache_stats import GroupStats as GroupStats
from prefix_cache.kv_cache.kv_cache_stats import KVCacheStats as KVCacheStats
from prefix_cache.kv_cache.kv_cache_stats import PrefixMiss as PrefixMiss
from prefix_cache.kv_cache.offloaded_blocks import OffloadedBlocks as OffloadedBlocks
from prefix_cache.kv_cache.swap_space import SwapSpace as SwapSpace
from prefix_cache.layer_types.coordinator import MANAGER_TYPES as MANAGER_TYPES
from prefix_cache.layer_types.coordinator import ChunkStops as ChunkStops
from prefix_cache.layer_types.coordinator import CrossAttentionManager as CrossAttentionManager
from prefix_cache.layer_types.coordinator import FullAttentionManager as FullAttentionManager
from prefix_cache.layer_types.coordinator import KVCacheCoordinator as KVCacheCoordinator
from prefix_cache.layer_types.coordinator import MambaManager as MambaManager
from prefix_cache.layer_types.coordinator import (
    SingleTypeKVCacheManager as SingleTypeKVCacheManager,
)
from prefix_cache.layer_types.coordinator import SlidingWindowManager as SlidingWindowManager
from prefix_cache.specs.kv_cache_spec import AttentionSpec as AttentionSpec
from prefix_cache.specs.kv_cache_spec import CrossAttentionSpec as CrossAttentionSpec
from prefix_cache.specs.kv_cache_spec import FullAttentionSpec as FullAttentionSpec
from prefix_cache.specs.kv_cache_spec import HostOnlySpec as HostOnlySpec
from prefix_cache.specs.kv_cache_spec import KVCacheConfig as KVCacheConfig
from prefix_cache.specs.kv_cache_spec import KVCacheGroup as KVCacheGroup
from prefix_cache.specs.kv_cache_spec import KVCacheSpec as KVCacheSpec
from prefix_cache.specs.kv_cache_spec import MambaSpec as MambaSpec
from prefix_cache.specs.kv_cache_spec import SlidingWindowSpec as SlidingWindowSpec
from prefix_cache.specs.kv_cache_spec import StateTensor as StateTensor
from prefix_cache.specs.kv_cache_spec import group_layers as group_layers
from prefix_cache.specs.kv_cache_spec import pad_pages as pad_pages
from prefix_cache.specs.kv_cache_spec import spec_in_words as spec_in_words
from prefix_cache.stores.offload_tiers import DiskTier as DiskTier
from prefix_cache.stores.offload_tiers import HostTier as HostTier
from prefix_cache.stores.offload_tiers import OffloadStats as OffloadStats
from prefix_cache.stores.paged_memory import LayerKVCache as LayerKVCache
from prefix_cache.stores.paged_memory import PageCopy as PageCopy
from prefix_cache.stores.paged_memory import PagedMemory as PagedMemory
from prefix_cache.stores.stage_output_cache import StageOutputCache as StageOutputCache
from prefix_cache.stores.whole_input_cache import WholeInputCache as WholeInputCache
