"""A request is left alone until blocks can be given back, and not a token longer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefix_cache import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheManager,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    StateTensor,
    group_layers,
)

BLOCK_SIZE = 4
HEADS = (1, 8, torch.float32)
FULL = FullAttentionSpec(BLOCK_SIZE, *HEADS)
MAMBA = MambaSpec(BLOCK_SIZE, (StateTensor((4,), torch.float32),))
LENGTHS = st.integers(BLOCK_SIZE, 20)
SPECS = st.one_of(
    st.builds(lambda n: SlidingWindowSpec(BLOCK_SIZE, *HEADS, n), LENGTHS),
    st.builds(lambda n: ChunkedLocalAttentionSpec(BLOCK_SIZE, *HEADS, n), LENGTHS),
    st.just(MAMBA),
)


def manager_of(specs: list[KVCacheSpec]) -> KVCacheManager:
    groups = group_layers({f"layer.{i}": spec for i, spec in enumerate([FULL, *specs])})
    return KVCacheManager(KVCacheConfig(60, groups), output_names=())


@given(spec=SPECS, num_computed_tokens=st.integers(0, 100))
def test_the_first_block_needed_is_the_same_until_the_next_release(
    spec: KVCacheSpec, num_computed_tokens: int
):
    tables = manager_of([spec]).coordinator.managers[1]
    until = tables.next_release(num_computed_tokens)
    assert until > num_computed_tokens
    needed = {tables.first_needed_block(n) for n in range(num_computed_tokens, until)}
    assert needed == {tables.first_needed_block(num_computed_tokens)}


@pytest.mark.parametrize("spec", [FULL, CrossAttentionSpec(BLOCK_SIZE, *HEADS)])
def test_what_is_needed_to_the_end_is_never_released(spec: KVCacheSpec):
    tables = manager_of([spec]).coordinator.managers[-1]
    assert tables.first_needed_block(10**6) == 0 and tables.next_release(0) > 10**9


@given(
    specs=st.lists(SPECS, max_size=3, unique=True),
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=30),
)
def test_after_every_step_only_what_is_needed_is_held(specs: list[KVCacheSpec], counts: list[int]):
    manager = manager_of(specs)
    computed = 0
    for count in counts:
        if not manager.allocate_slots("r", computed + count, num_computed_tokens=computed):
            break
        for group_id, tables in enumerate(manager.coordinator.managers):
            block_ids = manager.block_ids("r", group_id)
            first = min(tables.first_needed_block(computed), len(block_ids) - 1)
            assert not any(block_ids[:first])
            assert block_ids[first] or tables.keeps_states
            assert block_ids[-1] and len(block_ids) == -(-(computed + count) // BLOCK_SIZE)
        computed += count
