"""Sizes of pages, and layers that keep the same thing in one group."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefix_cache import (
    CrossAttentionSpec,
    FullAttentionSpec,
    HostOnlySpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    MambaSpec,
    StateTensor,
    group_layers,
)
from prefix_cache.specs.kv_cache_spec import pad_pages
from tests.support.tiny_kv_cache import mixed_config


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


def test_the_example_of_two_and_three_layers():
    # 2 cross-attention and 3 self-attention layers, 128 bytes per layer and token, block size 1:
    # two heads of eight fp32 elements, keys and values.
    attention = {"num_kv_heads": 2, "head_dim": 8, "dtype": torch.float32}
    cross = KVCacheGroup(("c0", "c1"), CrossAttentionSpec(1, **attention))
    full = KVCacheGroup(("s0", "s1", "s2"), FullAttentionSpec(1, **attention))
    config = KVCacheConfig(4, (cross, full))
    assert [group.page_bytes for group in config.groups] == [256, 384]
    assert config.large_page_bytes == 768
    assert [config.pages_per_large_page(group_id) for group_id in (0, 1)] == [3, 2]
    assert [config.num_blocks(group_id) for group_id in (0, 1)] == [12, 8]


def test_states_are_aligned_one_after_another():
    states = (StateTensor((3, 5), torch.bfloat16), StateTensor((7,), torch.float32))
    assert [state.nbytes for state in states] == [32, 32]
    assert MambaSpec(16, states).layer_page_bytes == 64


def test_host_only_groups_take_nothing_on_the_device():
    config = mixed_config({"sliding": 3, "host": 1}, 5, 4, num_host_blocks=9)
    assert config.large_page_bytes == config.groups[0].page_bytes == 3 * 32
    assert [config.num_blocks(group_id) for group_id in (0, 1)] == [5, 9]
    assert config.pages_per_large_page(1) == 1 and not config.groups[1].on_device


def test_pages_that_suit_each_other_are_not_padded():
    groups = mixed_config({"full": 2, "sliding": 3, "mamba": 5, "host": 1}, 2, 4).groups
    assert pad_pages(groups) == groups


def test_an_odd_state_is_padded_and_attention_is_kept():
    attention = KVCacheGroup(("a", "b"), spec(block_size=4, head_dim=8))
    odd = MambaSpec(4, (StateTensor((1009,), torch.float32),))
    for groups in ([KVCacheGroup(("m",), odd), attention], [attention, KVCacheGroup(("m",), odd)]):
        padded = {type(group.spec): group for group in pad_pages(groups)}
        assert padded[FullAttentionSpec].padding_bytes == 0
        assert 0 < padded[MambaSpec].padding_bytes < odd.layer_page_bytes
        assert [type(group.spec) for group in pad_pages(groups)] == [type(g.spec) for g in groups]


@given(
    attention=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 5)), min_size=1, max_size=3),
    states=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 2000)), max_size=2),
    block_size=st.sampled_from([1, 3, 16]),
)
def test_a_large_page_is_at_most_64_of_the_largest_and_views_stay_whole(
    attention, states, block_size
):
    groups = [
        KVCacheGroup(
            tuple(map(str, range(layers))),
            FullAttentionSpec(block_size, num_kv_heads=heads, head_dim=3, dtype=torch.float32),
        )
        for layers, heads in attention
    ]
    groups += [
        KVCacheGroup(
            tuple(map(str, range(layers))),
            MambaSpec(block_size, (StateTensor((width,), torch.float32),)),
        )
        for layers, width in states
    ]
    padded = pad_pages(groups)
    config = KVCacheConfig(2, padded)
    largest = max(group.page_bytes for group in padded)
    assert config.large_page_bytes <= 64 * largest
    for before, after in zip(groups, padded, strict=True):
        assert after.padding_bytes >= 0 and after.content_bytes == before.content_bytes
        assert after.page_bytes % after.spec.page_unit_bytes == 0
    # The first to be placed, the largest attention page, is never padded.
    assert any(g.padding_bytes == 0 for g in padded if isinstance(g.spec, FullAttentionSpec))


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        spec(block_size=0)
    with pytest.raises(ValueError, match=r"at least 2 .*got 1"):
        KVCacheConfig(1, (KVCacheGroup(("a",), spec()),))
    with pytest.raises(ValueError, match="at least one group"):
        KVCacheConfig(8, ())
    host = KVCacheGroup((), HostOnlySpec(4))
    with pytest.raises(ValueError, match="at least one group of layers"):
        KVCacheConfig(8, (host,), num_host_blocks=8)
    with pytest.raises(ValueError, match=r"num_host_blocks must be at least 2 .*got 0"):
        KVCacheConfig(8, (KVCacheGroup(("a",), spec()), host))
    with pytest.raises(ValueError, match="window of 3 tokens is smaller than a block of 4"):
        mixed_config({"sliding": 1}, 8, 4, reach=3)
    with pytest.raises(ValueError, match="chunk of 3 tokens is smaller than a block of 4"):
        mixed_config({"chunked": 1}, 8, 4, reach=3)
    with pytest.raises(NotImplementedError, match="KVCacheSpec states no page size"):
        _ = KVCacheSpec(4).layer_page_bytes
