"""The integrity check finds every kind of planted corruption and prints the failing equation."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prefix_cache import IntegrityError, KVCacheManager, check_integrity
from tests.support.tiny_kv_cache import hashes_of, tiny_config

PROMPT = list(range(12))


def healthy_manager() -> KVCacheManager:
    """9 blocks of 4: null, 2 held by "live" (1 pending hash), 3 cached, 3 free."""
    manager = KVCacheManager(tiny_config(9, 4))
    hashes = hashes_of(PROMPT, 4)
    manager.allocate_slots("done", 12, block_hashes=hashes)
    manager.publish("done", hashes, 12)
    manager.free("done")
    live = hashes_of(range(50, 58), 4)
    manager.allocate_slots("live", 8, block_hashes=live)
    manager.publish("live", live, 4)
    return manager


def test_a_healthy_manager_passes():
    manager = healthy_manager()
    check_integrity(manager)
    stats = manager.stats()
    assert (stats.free, stats.held, stats.cached) == (3, 2, 3)
    assert manager.block_ids("live") == [4, 5]


def lose_a_free_block(manager: KVCacheManager) -> None:
    manager.pool.free_queue.popleft()


def leak_a_reference(manager: KVCacheManager) -> None:
    manager.pool.blocks[4].ref_cnt += 1


def forget_a_reference(manager: KVCacheManager) -> None:
    manager.pool.blocks[4].ref_cnt = 0
    manager.pool.cached_queue.append(manager.pool.blocks[4])


def swap_queues(manager: KVCacheManager) -> None:
    manager.pool.free_queue.append(manager.pool.cached_queue.popleft())


def lose_a_hash(manager: KVCacheManager) -> None:
    del manager.pool.hash_table[(0, hashes_of(PROMPT, 4)[1])]


def misdirect_a_hash(manager: KVCacheManager) -> None:
    manager.pool.hash_table[(0, hashes_of(PROMPT, 4)[1])] = manager.pool.blocks[1]


def skip_a_generation(manager: KVCacheManager) -> None:
    manager.pool.generations[4] += 1


def use_the_null_block(manager: KVCacheManager) -> None:
    manager.pool.null_block.generation = 1


def orphan_a_pending_hash(manager: KVCacheManager) -> None:
    manager.pending.add("ghost", hashes_of([7] * 4, 4))


def orphan_a_table(manager: KVCacheManager) -> None:
    manager.coordinator.managers[0].block_tables["ghost"] = []


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (
            lose_a_free_block,
            r"free \(2\) \+ held \(2\) \+ cached \(3\) \+ null \(1\) = 8, expected num_blocks = 9",
        ),
        (leak_a_reference, r"block 4: ref_cnt \(2\) != places in block tables \(1\)"),
        (forget_a_reference, r"block 4: ref_cnt \(0\) != places in block tables \(1\)"),
        (
            swap_queues,
            r"block 3 \(ref_cnt 0, hash [0-9a-f]{12}\): in \(free queue, cached queue\) = "
            r"\(True, False\), expected \(False, True\)",
        ),
        (lose_a_hash, r"blocks with a hash \(4\) != hash table entries \(3\)"),
        (misdirect_a_hash, r"hash table entry \(group 0, [0-9a-f]{12}\) leads to block 1, which"),
        (skip_a_generation, r"block 4: generation \(1\) != generations\[4\] \(2\)"),
        (use_the_null_block, r"null block: ref_cnt \(0\), generation \(1\)"),
        (orphan_a_pending_hash, r"pending hash [0-9a-f]{12} is owned by \['ghost'\].*\['live'\]"),
        (orphan_a_table, r"table in group 0 \['ghost', 'live'\] != live requests \['live'\]"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_corruption_is_found_and_told(corrupt: Callable[[KVCacheManager], None], message: str):
    manager = healthy_manager()
    corrupt(manager)
    with pytest.raises(IntegrityError, match=message):
        check_integrity(manager)
