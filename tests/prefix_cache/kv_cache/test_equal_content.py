"""Two requests computed the same, each in blocks of its own: neither takes a hit from the other."""

from __future__ import annotations

import pytest
import torch

from prefix_cache import (
    BlockHash,
    BlockPool,
    KVCacheManager,
    StageOutputCache,
    WholeInputCache,
    check_integrity,
    check_pool_integrity,
)
from tests.support.tiny_kv_cache import GROUP_MIXES, hashes_of, mixed_config

BLOCK_SIZE = 4
PROMPT = list(range(20))
ANSWER = list(range(100, 128))
NEXT_TURN = [*PROMPT, *ANSWER, *range(200, 207)]


def grow(manager: KVCacheManager, name: str, ids: list[int], start: int) -> None:
    """Compute ``ids[start:]`` a token a step, and publish what becomes full."""
    for end in range(start + 1, len(ids) + 1):
        assert manager.allocate_slots(name, end, num_computed_tokens=end - 1)
        manager.publish(name, hashes_of(ids, BLOCK_SIZE), end)
    check_integrity(manager)


def begin(manager: KVCacheManager, name: str) -> None:
    prefix = manager.find_cached_prefix(hashes_of(PROMPT, BLOCK_SIZE), len(PROMPT))
    hashes = hashes_of(PROMPT, BLOCK_SIZE)
    assert manager.allocate_slots(name, len(PROMPT), prefix=prefix, block_hashes=hashes)
    manager.publish(name, hashes, len(PROMPT))


@pytest.mark.parametrize("mix", sorted(GROUP_MIXES))
def test_a_twin_that_is_evicted_costs_no_hit_whatever_the_layers_keep(mix: str) -> None:
    config = mixed_config(GROUP_MIXES[mix], 60, BLOCK_SIZE, num_host_blocks=60)
    hits = []
    for has_twin in (False, True):
        manager = KVCacheManager(config, output_names=(), max_num_batched_tokens=64)
        begin(manager, "A")
        if has_twin:
            begin(manager, "B")
            grow(manager, "B", PROMPT + ANSWER, len(PROMPT))
        grow(manager, "A", PROMPT + ANSWER, len(PROMPT))
        if has_twin:
            manager.free("B")
        # Take all that is free or cached, in one group after the other, and give it back.
        for group_id in range(len(config.groups)):
            taken = manager.pool.allocate({group_id: manager.pool.num_free(group_id)})
            manager.pool.release(taken[group_id])
        check_integrity(manager)
        hashes = hashes_of(NEXT_TURN, BLOCK_SIZE)
        hits.append(manager.find_cached_prefix(hashes, len(NEXT_TURN)).num_tokens)
    assert hits[1] == hits[0] == 48


def test_whole_inputs_that_two_steps_computed_are_found_while_one_is_held() -> None:
    pool = BlockPool.uniform(6)
    rows = StageOutputCache(6, BLOCK_SIZE, pool.generations(0), ["h"])
    cache = WholeInputCache(pool, rows, BLOCK_SIZE)
    key = BlockHash(bytes(32))
    held = [cache.allocate(7) for _ in range(2)]
    for blocks in held:
        slots = rows.slots(torch.tensor([block.block_id for block in blocks]))[:7]
        rows.write(slots, {"h": torch.ones(7, 1)})
        cache.publish(key, 7, blocks)
    first, second = held
    cache.release(second)
    taken = cache.allocate(3 * BLOCK_SIZE)  # evicts them
    found = cache.find(key, 7)
    assert found == first
    check_pool_integrity(pool, [first, first, taken])
