"""The facade: hits, waiting, allocation as a whole or not at all, publishing, giving back."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from prefix_cache import (
    CachedPrefix,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheManager,
    check_integrity,
)
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
    assert not find(manager, [*PROMPT, 1]).in_flight and not manager.pending.counts


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


def test_headroom_is_left_over():
    manager = new_manager(num_blocks=5)
    run(manager, "a", PROMPT)
    prefix = find(manager, PROMPT)  # 2 of 4 blocks, 1 more to allocate, 1 left over
    assert manager.can_finish(12, prefix=prefix, headroom=1)
    assert not manager.can_finish(12, prefix=prefix, headroom=2)


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


def test_switched_off_nothing_is_found_and_all_else_is_the_same():
    manager = new_manager(enable_prefix_caching=False)
    for request_id in ("a", "b"):
        prefix = admit(manager, request_id, PROMPT)
        assert prefix == CachedPrefix(((),), num_tokens=0, in_flight=False)
        write(manager, request_id, 0, 12, h=1.0)
        manager.publish(request_id, hashes_of(PROMPT, BLOCK_SIZE), 12)
        assert manager.gather_outputs(request_id, 12)["h"].shape == (12, 2)
    assert not manager.pool.hash_tables[0] and not manager.pending.counts
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
    assert manager.pool.num_free() == 5
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


def test_outputs_need_a_group_that_keeps_all_tokens():
    with pytest.raises(ValueError, match="only: SlidingWindowSpec, MambaSpec. Add a group of Host"):
        KVCacheManager(mixed_config({"sliding": 1, "mamba": 1}, 8, BLOCK_SIZE))
