"""Block tables of every kind of layer while requests run: what is needed is held, no more."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_cache import (
    BlockPool,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderBlocks,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheManager,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    StateTensor,
    check_integrity,
    group_layers,
)
from prefix_cache.layer_types.coordinator import KVCacheCoordinator
from tests.support.examples import examples
from tests.support.tiny_kv_cache import GROUP_MIXES, hashes_of, mixed_config

BLOCK_SIZE = 4
CHUNKS = st.lists(st.integers(1, 13), min_size=1, max_size=8)
KINDS = ["full", "sliding", "chunked", "mamba", "host"]


def first_visible(kind: str, position: int, reach: int) -> int:
    if kind == "sliding":
        return max(0, position - reach + 1)
    if kind == "chunked":
        return position - position % reach
    return 0


def check_step(manager: KVCacheManager, kind: str, group: int, start: int, end: int) -> None:
    """The places of ``[start, end)`` and of all that they see are held, as blocks of their own."""
    table = manager.block_ids("a", group)
    reach = 7
    if kind == "mamba":
        # The state after token start - 1, and the one after token end - 1.
        places = {index // BLOCK_SIZE for index in (start - 1, end - 1) if index >= 0}
        assert len(table) - 1 == max(places)
    else:
        places = {
            seen // BLOCK_SIZE
            for position in range(start, end)
            for seen in range(first_visible(kind, position, reach), position + 1)
        }
    held = [table[index] for index in sorted(places)]
    assert 0 not in held and len(set(held)) == len(held)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(40))
@given(chunks=CHUNKS, cached=st.booleans())
def test_all_that_a_step_sees_is_held_and_no_more_than_the_bound(kind, chunks, cached):
    layers = {kind: 1, "full ": 1} if kind == "host" else {kind: 1, "host": 1}
    manager = KVCacheManager(
        mixed_config(layers, 40, BLOCK_SIZE, reach=7),
        enable_prefix_caching=cached,
        max_num_batched_tokens=max(chunks),
    )
    total = sum(chunks)
    token_ids = list(range(total))
    hashes = hashes_of(token_ids, BLOCK_SIZE)
    bound = manager.coordinator.max_blocks(total)[0]
    start = 0
    for chunk in chunks:
        end = start + chunk
        assert manager.allocate_slots("a", end, num_computed_tokens=start)
        check_step(manager, kind, 0, start, end)
        assert sum(block_id != 0 for block_id in manager.block_ids("a")) <= bound
        manager.publish("a", hashes, end)
        start = end
        check_integrity(manager)
    manager.free("a")
    assert manager.stats().held == 0


@pytest.mark.parametrize("kind", ["sliding", "chunked"])
@settings(max_examples=examples(40))
@given(chunk=st.integers(1, 9), reach=st.integers(BLOCK_SIZE, 11))
def test_a_long_request_holds_its_neighbourhood_only(kind, chunk, reach):
    config = mixed_config({kind: 1, "host": 1}, 12, BLOCK_SIZE, reach=reach)
    manager = KVCacheManager(config, enable_prefix_caching=False, max_num_batched_tokens=chunk)
    bound = manager.coordinator.max_blocks(400)[0]
    assert bound == (reach - 1 + chunk + BLOCK_SIZE - 2) // BLOCK_SIZE + 1 < 12
    held = []
    for start in range(0, 400, chunk):
        assert manager.allocate_slots("a", start + chunk, num_computed_tokens=start)
        held.append(sum(block_id != 0 for block_id in manager.block_ids("a")))
    assert max(held) <= bound
    if chunk % 2 and kind == "sliding":
        assert max(held) == bound, "the bound is no larger than it must be"
    assert manager.stats().free + manager.stats().held == 11


@given(num_tokens=st.integers(1, 40), chunks=CHUNKS, hit=st.integers(0, 6))
def test_the_bound_holds_for_a_request_that_begins_with_a_hit(num_tokens, chunks, hit):
    mix = {"sliding": 2, "chunked": 1, "mamba": 3, "host": 1}
    manager = KVCacheManager(
        mixed_config(mix, 40, BLOCK_SIZE, reach=7), max_num_batched_tokens=max(chunks)
    )
    token_ids = list(range(hit * BLOCK_SIZE + 1 + sum(chunks)))
    hashes = hashes_of(token_ids, BLOCK_SIZE)
    for end in range(BLOCK_SIZE, hit * BLOCK_SIZE + 1, BLOCK_SIZE):
        assert manager.allocate_slots("b", end, num_computed_tokens=end - BLOCK_SIZE)
        manager.publish("b", hashes, end)
    if hit:
        manager.free("b")
    prefix = manager.find_cached_prefix(hashes, hit * BLOCK_SIZE + 1)
    assert prefix.num_tokens == hit * BLOCK_SIZE
    bounds = manager.coordinator.max_blocks(len(token_ids))
    start = prefix.num_tokens
    for index, chunk in enumerate(chunks):
        assert manager.allocate_slots(
            "a",
            start + chunk,
            num_computed_tokens=start,
            prefix=None if index else prefix,
            block_hashes=() if index else hashes,
        )
        for group, kind in enumerate(mix):
            check_step(manager, kind, group, start, start + chunk)
            held = [block_id for block_id in manager.block_ids("a", group) if block_id]
            assert len(held) <= bounds[group]
        start += chunk
        manager.publish("a", hashes, start)
        check_integrity(manager)


@given(encoder=st.integers(1, 30), chunks=CHUNKS)
def test_a_cross_attention_table_is_taken_once(encoder, chunks):
    manager = KVCacheManager(mixed_config(GROUP_MIXES["mllama"], 40, BLOCK_SIZE))
    tables = []
    end = 0
    for chunk in chunks:
        assert manager.allocate_slots(
            "a", end + chunk, num_computed_tokens=end, encoder=EncoderBlocks(encoder, ())
        )
        end += chunk
        tables.append(manager.block_ids("a", 0))
    assert all(table == tables[0] for table in tables)
    assert len(tables[0]) == -(-encoder // BLOCK_SIZE) and 0 not in tables[0]
    assert manager.coordinator.max_blocks(end, encoder)[0] == len(tables[0])


@pytest.mark.parametrize("mix", GROUP_MIXES)
@settings(max_examples=examples(40))
@given(num_tokens=st.integers(1, 60), budget=st.integers(1, 16), pages=st.integers(2, 8))
def test_a_request_that_fits_runs_to_its_end_in_an_empty_pool(mix, num_tokens, budget, pages):
    config = mixed_config(GROUP_MIXES[mix], pages, BLOCK_SIZE, reach=7)
    manager = KVCacheManager(config, max_num_batched_tokens=budget)
    if not manager.fits(num_tokens, num_encoder_tokens=9):
        return
    assert manager.can_finish(num_tokens, num_encoder_tokens=9)
    hashes = hashes_of(range(num_tokens), BLOCK_SIZE)
    for start in range(0, num_tokens, budget):
        end = min(start + budget, num_tokens)
        assert manager.allocate_slots(
            "a", end, num_computed_tokens=start, encoder=EncoderBlocks(9, ()), block_hashes=hashes
        )
        manager.publish("a", hashes, end)
    check_integrity(manager)


def test_blocks_of_a_request_lie_together() -> None:
    config = mixed_config({"full": 2, "sliding": 3}, 9, BLOCK_SIZE, reach=99)
    pool = BlockPool.for_config(config)
    coordinator = KVCacheCoordinator(config, pool, 64)
    assert [config.pages_per_large_page(group_id) for group_id in (0, 1)] == [3, 2]

    def pages(request_id: str, group_id: int) -> list[int]:
        table = coordinator.managers[group_id].block_tables[request_id]
        return [block.large_page.page_id for block in table]

    assert coordinator.allocate("a", 4 * BLOCK_SIZE)
    assert (pages("a", 0), pages("a", 1)) == ([1, 1, 1, 2], [3, 3, 4, 4])
    # The group's own half-used page goes before a new one.
    assert coordinator.allocate("b", BLOCK_SIZE)
    assert (pages("b", 0), pages("b", 1)) == ([2], [5])
    # Each goes on where it is, while there is room.
    assert coordinator.allocate("a", 5 * BLOCK_SIZE)
    assert (pages("a", 0)[4:], pages("a", 1)[4:]) == ([2], [5])
    assert coordinator.allocate("b", 3 * BLOCK_SIZE)
    assert (pages("b", 0), pages("b", 1)) == ([2, 6, 6], [5, 7, 7])
    coordinator.free("a")
    assert {page.page_id for page in pool.arenas[0].free_pages} == {1, 3, 4, 8}
    coordinator.free("b")
    assert len(pool.arenas[0].free_pages) == 8


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
