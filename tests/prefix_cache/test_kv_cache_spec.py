"""Sizes of pages, and layers that keep the same thing in one group."""

from __future__ import annotations

import pytest
import torch

from prefix_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroup, KVCacheSpec, group_layers


def spec(
    block_size: int = 16, head_dim: int = 64, dtype: torch.dtype = torch.float32
) -> FullAttentionSpec:
    return FullAttentionSpec(block_size, num_kv_heads=4, head_dim=head_dim, dtype=dtype)


def test_page_sizes():
    # 16 tokens x K and V x 4 heads of 64 x 4 bytes, then twelve layers of that.
    assert spec().layer_page_bytes == 16 * 2 * 4 * 64 * 4 == 32_768
    assert spec(dtype=torch.bfloat16).layer_page_bytes == 16_384
    assert KVCacheGroup(tuple(map(str, range(12))), spec()).page_bytes == 12 * 32_768


def test_layers_of_one_spec_are_one_group_in_the_order_of_the_model():
    wide = spec(head_dim=128)
    groups = group_layers({"a": spec(), "b": wide, "c": spec(), "d": wide, "e": spec()})
    assert groups == (KVCacheGroup(("a", "c", "e"), spec()), KVCacheGroup(("b", "d"), wide))


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        spec(block_size=0)
    with pytest.raises(ValueError, match=r"at least 2 .*got 1"):
        KVCacheConfig(1, (KVCacheGroup(("a",), spec()),))
    with pytest.raises(ValueError, match="at least one group"):
        KVCacheConfig(8, ())
    with pytest.raises(NotImplementedError, match="KVCacheSpec states no page size"):
        _ = KVCacheSpec(4).layer_page_bytes
