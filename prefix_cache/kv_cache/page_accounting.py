"""What pages cost: what a request needs, what it holds, and what pages of one size would hold.

A request of 4 text tokens and 6 image tokens, one cross-attention and two self-attention layers,
block size 1. Each letter is a token of a layer; a dot is memory in vain::

    needed, and held by pages per group      held by pages of one size
    cross   i i i i i i                      cross   i i i i i i . . . .
    self    t t t t                          self    . . . . . . t t t t
    self    t t t t                          self    . . . . . . t t t t
                                                     one page: a column
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from prefix_cache.kv_cache.kv_cache_manager import KVCacheManager
from prefix_cache.specs.kv_cache_config import KVCacheGroup
from prefix_cache.specs.kv_cache_spec import (
    AttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
)

__all__ = ["needed_bytes", "one_size_groups", "request_bytes"]


def needed_bytes(
    groups: Sequence[KVCacheGroup], num_tokens: int, num_encoder_tokens: int = 0
) -> int:
    """Bytes that one request's last token works with, if nothing were rounded to pages.

    Args:
        groups: what the model's layers keep.
        num_tokens: of the request, the last one included.
        num_encoder_tokens: for cross-attention.
    """
    return sum(
        len(group.layer_names) * _needed_by_layer(group.spec, num_tokens, num_encoder_tokens)
        for group in groups
    )


def request_bytes(manager: KVCacheManager, num_tokens: int, num_encoder_tokens: int = 0) -> int:
    """Bytes of the pages that one request holds while its last token alone runs.

    Prefill holds more for a step: windows keep what the first token of a chunk sees.

    Args:
        manager: tells which blocks the layers can still need; its state plays no part.
        num_tokens: of the request, the last one included.
        num_encoder_tokens: for cross-attention.
    """
    total = 0
    for group, tables in zip(manager.config.groups, manager.coordinator.managers, strict=True):
        if tables.follows_tokens:
            num_blocks = -(-num_tokens // manager.block_size)
            num_blocks -= tables.first_needed_block(num_tokens - 1)
        else:
            num_blocks = tables.max_blocks(num_encoder_tokens)
        total += num_blocks * group.page_bytes
    return total


def one_size_groups(groups: Sequence[KVCacheGroup]) -> tuple[KVCacheGroup, ...]:
    """The same layers under an allocator whose pages all have one size.

    Every token, and every encoder token, takes a slot in every attention layer, windows and
    cross-attention included; layers of several widths take the widest. A page holds one block of
    all attention layers. Where there are recurrent layers too, blocks are so long that an attention
    layer's share of a page holds a state, and states are padded to it, as many layers to a page.

    Groups without attention layers are of one size already (and stay as they are).
    """
    attention = [group.spec for group in groups if isinstance(group.spec, AttentionSpec)]
    states = [(group, group.spec) for group in groups if isinstance(group.spec, MambaSpec)]
    if not attention:
        return tuple(groups)
    widest = max(attention, key=lambda spec: spec.layer_page_bytes)
    largest_state = max((spec.layer_page_bytes for _, spec in states), default=0)
    block_size = widest.block_size * max(1, -(-largest_state // widest.layer_page_bytes))
    shape = (block_size, widest.num_kv_heads, widest.head_dim, widest.dtype)
    names = tuple(
        name
        for group in groups
        if isinstance(group.spec, AttentionSpec)
        for name in group.layer_names
    )
    result = [KVCacheGroup(names, FullAttentionSpec(*shape))]
    if any(isinstance(spec, CrossAttentionSpec) for spec in attention):
        result.append(KVCacheGroup(names, CrossAttentionSpec(*shape)))
    page_bytes = result[0].page_bytes
    for group, spec in states:
        for first in range(0, len(group.layer_names), len(names)):
            layers = group.layer_names[first : first + len(names)]
            padding = page_bytes - len(layers) * spec.layer_page_bytes
            result.append(KVCacheGroup(layers, replace(spec, block_size=block_size), padding))
    return tuple(result)


def _needed_by_layer(spec: KVCacheSpec, num_tokens: int, num_encoder_tokens: int) -> int:
    if not isinstance(spec, AttentionSpec):
        return spec.layer_page_bytes  # one state, or nothing
    num_needed = spec.num_needed(num_tokens, num_encoder_tokens)
    return num_needed * (spec.layer_page_bytes // spec.block_size)
