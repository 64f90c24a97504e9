"""The facade: hits, waiting, allocation as a whole or not at all, publishing, giving back."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from prefix_cache import (
    BlockPool,
    CachedPrefix,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheManager,
    check_integrity,
)
from prefix_cache.layer_types.coordinator import KVCacheCoordinator
from tests.support.tiny_kv_cache import hashes_of, held_block, mixed_config, tiny_config

BLOCK_SIZE = 4
PROMPT = list(range(100, 112))


def new_manager(num_blocks: int = 9, **kwargs) -> KVCacheManager:
    return KVCacheManager(tiny_config(num_blocks, BLOCK_SIZE), **kwargs)


def admit(manager: KVCacheManager, request_id: str, token_ids, salt=None) -> CachedPrefix:
    hashes = hashes_of(token_ids, BLOCK_SIZE, salt)
    prefix = manager.find_cached_prefix(hashes, len(token_ids))
    assert manager.allocate_slots(request_id, len(token_ids), prefix=prefix, block_hashes=hashes)
    return prefix


def write(manager: KVCacheManager, request_id: str, start: int, end: int, **rows: float) -> None:
    """Write rows filled with one number each for positions [start, end)."""
    table = torch.tensor(manager.block_ids(request_id))
    positions = torch.arange(start, end)
    manager.stage_outputs.write(
        table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        {name: torch.full((end - start, 2), value) for name, value in rows.items()},
    )


def run(manager: KVCacheManager, request_id: str, token_ids, salt=None, **rows: float) -> int:
    """Admit, write, publish, free: the number of cached tokens."""
    prefix = admit(manager, request_id, token_ids, salt)
    write(manager, request_id, prefix.num_tokens, len(token_ids), **rows)
    manager.publish(request_id, hashes_of(token_ids, BLOCK_SIZE, salt), len(token_ids))
    manager.free(request_id)
    check_integrity(manager)
    return prefix.num_tokens


def find(manager: KVCacheManager, token_ids, salt=None) -> CachedPrefix:
    return manager.find_cached_prefix(hashes_of(token_ids, BLOCK_SIZE, salt), len(token_ids))


@pytest.mark.parametrize(
    ("num_tokens", "num_cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)]
)
def test_the_last_token_and_partial_blocks_are_always_recomputed(num_tokens, num_cached):
    manager = new_manager()
    run(manager, "a", [*PROMPT, 1])
    prompt = [*PROMPT, 1][:num_tokens]
    # An equal prompt, run again and again, leaves at least one token to compute each time.
    for attempt in range(2):
        assert run(manager, f"b{attempt}", prompt) == num_cached


def test_nothing_is_found_before_it_is_published():
    manager = new_manager()
    admit(manager, "a", PROMPT)
    assert find(manager, PROMPT).num_tokens == 0
    manager.publish("a", hashes_of(PROMPT, BLOCK_SIZE), 7)
    assert find(manager, PROMPT).num_tokens == 4, "the second block lacks a token"
    manager.publish("a", hashes_of(PROMPT, BLOCK_SIZE), 8)
    assert find(manager, PROMPT).num_tokens == 8


def test_a_request_beside_one_that_computes_its_prefix_is_told_to_wait():
    manager = new_manager(num_blocks=12)
    hashes = hashes_of(PROMPT, BLOCK_SIZE)
    admit(manager, "a", PROMPT)
    assert find(manager, PROMPT).in_flight
    assert not find(manager, [*PROMPT[:3], 0, *PROMPT[4:]]).in_flight, "another prompt"
    assert not find(manager, PROMPT[:4]).in_flight, "its only full block holds its last token"
    manager.publish("a", hashes, 4)
    assert find(manager, PROMPT) == CachedPrefix(
        ((held_block(manager.pool, 1),),), num_tokens=4, in_flight=True
    )
    manager.publish("a", hashes, 8)
    assert not find(manager, PROMPT).in_flight, "the third block is its own to compute"
    assert find(manager, [*PROMPT, 1]).in_flight
    manager.free("a")
    assert not find(manager, [*PROMPT, 1]).in_flight and not manager.pending.owners


def test_a_block_stays_in_flight_until_its_last_owner_is_gone():
    manager = new_manager(num_blocks=12)
    for request_id in ("a", "b"):
        assert manager.allocate_slots(
            request_id, len(PROMPT), block_hashes=hashes_of(PROMPT, BLOCK_SIZE)
        )
    manager.free("a")
    assert find(manager, PROMPT).in_flight
    manager.free("b")
    assert not find(manager, PROMPT).in_flight


def test_requests_share_blocks_of_a_prefix():
    manager = new_manager()
    run(manager, "a", PROMPT)
    for request_id in ("b", "c"):
        assert admit(manager, request_id, [*PROMPT[:8], *request_id.encode()]).num_tokens == 8
    assert manager.block_ids("b")[:2] == manager.block_ids("c")[:2] == [1, 2]
    assert manager.block_ids("b")[2] != manager.block_ids("c")[2]
    assert [held_block(manager.pool, i).ref_cnt for i in (1, 2)] == [2, 2]
    check_integrity(manager)


def test_salts_keep_requests_apart():
    manager = new_manager()
    run(manager, "a", PROMPT, salt="alice")
    assert find(manager, PROMPT).num_tokens == 0
    assert find(manager, PROMPT, salt="bob").num_tokens == 0
    assert find(manager, PROMPT, salt="alice").num_tokens == 8


def test_the_three_request_recycling_case():
    # A writes k in a block; B gets the block and emits no k; C hits B's block, and must neither
    # be given A's k nor a hit without k.
    manager = new_manager(num_blocks=4)
    (a, b) = PROMPT, list(range(200, 212))
    assert run(manager, "A", a, h=1.0, k=1.0) == 0
    assert run(manager, "B", b, h=2.0) == 0
    assert manager.pool.lookup(0, hashes_of(b, BLOCK_SIZE)[0]) is not None
    assert find(manager, b).num_tokens == 0, "shortened to before the block without k"
    prefix = admit(manager, "C", b)
    assert prefix.num_tokens == 0
    write(manager, "C", 0, 12, h=3.0, k=3.0)
    manager.publish("C", hashes_of(b, BLOCK_SIZE), 12)
    outputs = manager.gather_outputs("C", 12)
    assert {name: rows.unique().tolist() for name, rows in outputs.items()} == {"h": [3], "k": [3]}
    manager.free("C")
    assert find(manager, b).num_tokens == 8, "the block computed again is the one that is found"
    check_integrity(manager)


def test_a_hit_is_shortened_to_before_the_first_block_without_wanted_rows():
    manager = new_manager()
    admit(manager, "a", PROMPT)
    write(manager, "a", 0, 4, h=1.0, k=1.0)
    write(manager, "a", 4, 12, h=1.0)
    manager.publish("a", hashes_of(PROMPT, BLOCK_SIZE), 12)
    assert find(manager, [*PROMPT, 1]).num_tokens == 4
    restricted = new_manager(output_names=["h"])
    run(restricted, "a", PROMPT, h=1.0)
    assert find(restricted, PROMPT).num_tokens == 8, "k is not wanted"


def test_a_block_computed_without_wanted_rows_is_not_waited_for():
    # It is published, so nothing more will come of it; the newcomer computes it with k.
    manager = new_manager(num_blocks=12)
    admit(manager, "a", PROMPT)
    write(manager, "a", 0, 12, h=1.0)
    manager.publish("a", hashes_of(PROMPT, BLOCK_SIZE), 12)
    run(manager, "other", [1, 2, 3, 4, 5], h=1.0, k=1.0)
    assert find(manager, PROMPT) == CachedPrefix(((),), num_tokens=0, in_flight=False)
    assert run(manager, "b", PROMPT, h=1.0, k=1.0) == 0
    # "a" has settled its blocks and does not take their hashes back.
    manager.publish("a", hashes_of(PROMPT, BLOCK_SIZE), 12)
    assert find(manager, PROMPT).num_tokens == 8


def test_a_request_does_not_publish_again_what_it_adopted():
    manager = new_manager(num_blocks=12)
    run(manager, "a", PROMPT, h=1.0)
    admit(manager, "b", PROMPT)  # adopts two blocks without k
    run(manager, "other", [1, 2, 3, 4, 5], h=1.0, k=1.0)
    run(manager, "c", PROMPT, h=1.0, k=1.0)
    manager.publish("b", hashes_of(PROMPT, BLOCK_SIZE), 12)
    assert find(manager, PROMPT).num_tokens == 8
    check_integrity(manager)


def test_outputs_after_preemption_are_complete():
    manager = new_manager()
    admit(manager, "a", PROMPT)
    write(manager, "a", 0, 9, h=1.0)
    manager.publish("a", hashes_of(PROMPT, BLOCK_SIZE), 9)
    manager.free("a")  # preempted
    prefix = admit(manager, "a", PROMPT)  # resumed
    assert prefix.num_tokens == 8
    write(manager, "a", 8, 12, h=2.0)
    outputs = manager.gather_outputs("a", 12)
    assert outputs["h"][:, 0].tolist() == [1.0] * 8 + [2.0] * 4


def test_prefix_blocks_nobody_holds_do_not_count_as_free():
    manager = new_manager(num_blocks=4)
    run(manager, "a", PROMPT)
    assert manager.pool.num_free() == 3
    longer = [*PROMPT, *range(4)]  # 4 blocks: 3 cached, 1 new, but only 3 exist
    hashes = hashes_of(longer, BLOCK_SIZE)
    prefix = manager.find_cached_prefix(hashes, len(longer))
    assert prefix.num_tokens == 12
    assert not manager.can_finish(16, prefix=prefix)
    assert not manager.allocate_slots("b", 16, prefix=prefix, block_hashes=hashes)
    assert manager.request_ids == frozenset() and manager.stats().cached == 3
    check_integrity(manager)
    assert manager.can_finish(12, prefix=prefix)
    assert manager.allocate_slots("b", 12, prefix=prefix, block_hashes=hashes)


def test_prefix_blocks_that_others_hold_cost_nothing():
    manager = new_manager(num_blocks=5)
    admit(manager, "a", PROMPT)
    manager.publish("a", hashes_of(PROMPT, BLOCK_SIZE), 12)
    assert manager.pool.num_free() == 1
    assert admit(manager, "b", [*PROMPT, 1]).num_tokens == 12
    assert manager.block_ids("b") == [1, 2, 3, 4]


def test_headroom_is_left_over():
    manager = new_manager(num_blocks=5)
    run(manager, "a", PROMPT)
    prefix = find(manager, PROMPT)  # 2 of 4 blocks, 1 more to allocate, 1 left over
    assert manager.can_finish(12, prefix=prefix, headroom=1)
    assert not manager.can_finish(12, prefix=prefix, headroom=2)


def test_an_allocation_never_evicts_the_prefix_it_builds_on():
    manager = new_manager(num_blocks=5)
    run(manager, "a", PROMPT)
    run(manager, "b", [1, 2, 3, 4])
    # Now all four blocks are cached, a's the least recently used of them.
    longer = [*PROMPT, 9]
    assert admit(manager, "c", longer).num_tokens == 12
    assert manager.block_ids("c") == [1, 2, 3, 4]
    check_integrity(manager)


def test_tables_grow_at_their_end_and_never_shrink():
    manager = new_manager()
    assert manager.allocate_slots("a", 5)
    assert manager.block_ids("a") == [1, 2]
    assert manager.allocate_slots("a", 8) and manager.block_ids("a") == [1, 2]
    assert manager.allocate_slots("a", 9) and manager.block_ids("a") == [1, 2, 3]
    assert manager.allocate_slots("a", 1) and manager.block_ids("a") == [1, 2, 3]
    assert not manager.allocate_slots("a", 8 * BLOCK_SIZE + 1)
    assert manager.block_ids("a") == [1, 2, 3]
    check_integrity(manager)


def test_the_tail_of_a_request_is_evicted_before_its_head():
    manager = new_manager(num_blocks=4)
    run(manager, "a", PROMPT)
    run(manager, "b", [1, 2, 3])
    assert find(manager, [*PROMPT, 1]).num_tokens == 8
    assert manager.stats().evictions == 1


def test_generated_tokens_are_cached_like_prompts():
    manager = new_manager()
    admit(manager, "a", PROMPT[:6])
    for length in range(7, 13):
        assert manager.allocate_slots("a", length)
        manager.publish("a", hashes_of(PROMPT[:length], BLOCK_SIZE), length - 1)
    manager.free("a")
    assert find(manager, PROMPT).num_tokens == 8


def test_reset_forgets_also_what_is_being_computed():
    manager = new_manager(num_blocks=12)
    run(manager, "old", [1] * 8)
    admit(manager, "a", PROMPT)
    manager.publish("a", hashes_of(PROMPT, BLOCK_SIZE), 4)
    manager.reset_prefix_cache()
    check_integrity(manager)
    manager.publish("a", hashes_of(PROMPT, BLOCK_SIZE), 12)
    assert not manager.pool.hash_tables[0]
    assert find(manager, PROMPT) == CachedPrefix(((),), num_tokens=0, in_flight=False)
    manager.free("a")
    # The same request, started after the reset, is as good as any.
    run(manager, "a", PROMPT)
    assert find(manager, PROMPT).num_tokens == 8


def test_switched_off_nothing_is_found_and_all_else_is_the_same():
    manager = new_manager(enable_prefix_caching=False)
    for request_id in ("a", "b"):
        prefix = admit(manager, request_id, PROMPT)
        assert prefix == CachedPrefix(((),), num_tokens=0, in_flight=False)
        write(manager, request_id, 0, 12, h=1.0)
        manager.publish(request_id, hashes_of(PROMPT, BLOCK_SIZE), 12)
        assert manager.gather_outputs(request_id, 12)["h"].shape == (12, 2)
    assert not manager.pool.hash_tables[0] and not manager.pending.owners
    with pytest.raises(ValueError, match="cannot be switched while 2 requests"):
        manager.enable_prefix_caching = True
    manager.free("a")
    manager.free("b")
    manager.enable_prefix_caching = True
    run(manager, "c", PROMPT, h=1.0)
    assert find(manager, PROMPT).num_tokens == 8
    manager.enable_prefix_caching = False
    assert find(manager, PROMPT).num_tokens == 0


def test_stats_tell_where_blocks_are_and_count_admitted_requests_only():
    manager = new_manager(num_blocks=8)
    run(manager, "a", PROMPT)
    admit(manager, "b", [*PROMPT[:4], 1])
    for _ in range(3):
        find(manager, PROMPT)
    stats = manager.stats()
    assert (stats.free, stats.held, stats.cached) == (3, 2, 2)
    assert stats.free + stats.held + stats.cached + 1 == stats.num_blocks == 8
    assert (stats.hit_tokens, stats.queried_tokens) == (4, 12 + 4)
    assert manager.pool.num_free() == 5 and manager.pool.usable_blocks() == 7
    assert [manager.pages_for(n) for n in (0, 1, 4, 5, 28)] == [0, 1, 1, 2, 7]
    assert [manager.fits(n) for n in (28, 29)] == [True, False]
    assert [manager.longest_sequence(limit) for limit in (20, 99)] == [20, 28]


def test_mistakes_are_named():
    manager = new_manager()
    for call in (
        lambda: manager.free("x"),
        lambda: manager.publish("x", [], 0),
        lambda: manager.block_ids("x"),
        lambda: manager.gather_outputs("x", 1),
    ):
        with pytest.raises(ValueError, match="request 'x' holds no blocks"):
            call()
    prefix = admit(manager, "a", PROMPT)
    with pytest.raises(ValueError, match="request 'a' holds blocks; a prefix comes first"):
        manager.allocate_slots("a", 20, prefix=prefix)


def test_an_outdated_prefix_is_refused_and_nothing_changes():
    manager = new_manager(num_blocks=4)
    run(manager, "a", PROMPT)
    hashes = hashes_of(PROMPT, BLOCK_SIZE)
    prefix = find(manager, PROMPT)
    with pytest.raises(ValueError, match="8 tokens does not fit into 7 tokens"):
        manager.allocate_slots("b", 7, prefix=prefix, block_hashes=hashes)
    with pytest.raises(ValueError, match="under the 0 block hashes given"):
        manager.allocate_slots("b", 12, prefix=prefix)
    run(manager, "c", list(range(12)))  # takes all blocks
    with pytest.raises(ValueError, match=r"no longer.* cached .* find it again"):
        manager.allocate_slots("b", 12, prefix=prefix, block_hashes=hashes)
    assert manager.request_ids == frozenset()
    check_integrity(manager)


@dataclass(frozen=True, slots=True)
class _UnknownSpec(FullAttentionSpec):
    """A layer type that nobody manages."""


def test_unknown_layer_types_and_mixed_block_sizes_are_refused():
    known = tiny_config(4, BLOCK_SIZE).groups[0]
    unknown = KVCacheGroup(("x",), _UnknownSpec(BLOCK_SIZE, 1, 1, torch.float32))
    with pytest.raises(
        NotImplementedError, match=r"no manager for _UnknownSpec; .*FullAttentionSpec"
    ):
        KVCacheManager(KVCacheConfig(4, (known, unknown)))
    other_size = tiny_config(4, 2 * BLOCK_SIZE).groups[0]
    with pytest.raises(NotImplementedError, match=r"one block size, got \[4, 8\]"):
        KVCacheManager(KVCacheConfig(4, (known, other_size)))


def test_a_hit_is_what_every_group_can_serve():
    config = mixed_config({"full": 1, "full ": 1}, 12, BLOCK_SIZE)
    coordinator = KVCacheCoordinator(config, BlockPool.for_config(config), 64)
    hashes = hashes_of(PROMPT, BLOCK_SIZE)
    assert coordinator.allocate("a", 12)
    first, second = coordinator.managers
    first.publish("a", hashes, 12)
    second.publish("a", hashes, 4)
    hit = coordinator.find_longest_cache_hit(hashes, 12)
    assert [[block.block_id for block in blocks] for blocks in hit] == [[1], [4]]


def test_a_hit_ends_at_the_first_block_that_is_missing():
    manager = new_manager()
    hashes = hashes_of(PROMPT, BLOCK_SIZE)
    for block, index in zip(manager.pool.allocate({0: 2})[0], (0, 2), strict=True):
        manager.pool.publish(block, hashes[index])
    assert find(manager, [*PROMPT, 1]).num_tokens == 4


def test_new_blocks_of_one_group_never_evict_the_prefix_of_another():
    manager = KVCacheManager(mixed_config({"full": 1, "full ": 1}, 5, BLOCK_SIZE))
    run(manager, "a", PROMPT[:4])
    run(manager, "b", [1, 2, 3, 4])
    # All four blocks are cached, the two of "a" least recently used: evicted first, if not held.
    longer = [*PROMPT[:4], 5]
    prefix = find(manager, longer)
    assert prefix.num_tokens == 4
    hashes = hashes_of(longer, BLOCK_SIZE)
    assert manager.allocate_slots("c", 5, prefix=prefix, block_hashes=hashes)
    assert [manager.block_ids("c", group_id) for group_id in (0, 1)] == [[1, 3], [2, 4]]
    check_integrity(manager)


def test_groups_are_allocated_together_or_not_at_all():
    manager = KVCacheManager(mixed_config({"full": 1, "full ": 1}, 8, BLOCK_SIZE))
    assert manager.pages_for(5) == 4
    assert manager.allocate_slots("a", 8) and manager.pool.num_free() == 3
    assert not manager.allocate_slots("b", 8), "one group would fit"
    assert not manager.allocate_slots("a", 16)
    assert [len(manager.block_ids("a", group_id)) for group_id in (0, 1)] == [2, 2]
    check_integrity(manager)
    assert manager.allocate_slots("b", 4) and manager.pool.num_free() == 1
    manager.free("a")
    manager.free("b")
    check_integrity(manager)
    assert manager.stats().free == 7


def test_outputs_need_a_group_that_keeps_all_tokens():
    with pytest.raises(ValueError, match="only: SlidingWindowSpec, MambaSpec. Add a group of Host"):
        KVCacheManager(mixed_config({"sliding": 1, "mamba": 1}, 8, BLOCK_SIZE))
