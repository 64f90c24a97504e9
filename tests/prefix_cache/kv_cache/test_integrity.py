"""The integrity check finds every kind of planted corruption and prints the failing equation."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prefix_cache import IntegrityError, KVCacheBlock, KVCacheManager, check_integrity
from tests.support.tiny_kv_cache import hashes_of, held_block, tiny_config

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


def equal_content_twice(manager: KVCacheManager) -> list[KVCacheBlock]:
    """Return the older duplicates of a block's content; "live" and "twin" hold one block each."""
    hashes = hashes_of(range(50, 58), 4)
    manager.allocate_slots("twin", 4, block_hashes=hashes[:1])
    manager.publish("twin", hashes[:1], 4)
    check_integrity(manager)
    return manager.pool.older[0, hashes[0]]


def lose_a_free_page(manager: KVCacheManager) -> None:
    manager.pool.arenas[0].free_pages.pop()


def leak_a_reference(manager: KVCacheManager) -> None:
    held_block(manager.pool, 4).ref_cnt += 1


def forget_a_reference(manager: KVCacheManager) -> None:
    block = held_block(manager.pool, 4)
    block.ref_cnt = 0
    manager.pool.arenas[0].groups[0].cached.append(block)


def list_a_cached_block_as_free(manager: KVCacheManager) -> None:
    block = held_block(manager.pool, 3)
    manager.pool.arenas[0].groups[0].cached.remove(block)
    manager.pool.arenas[0].pages[3].free.append(block)


def lose_an_unheld_page(manager: KVCacheManager) -> None:
    arena = manager.pool.arenas[0]
    arena.unheld.remove(arena.pages[3])


def clear_the_group_of_a_page(manager: KVCacheManager) -> None:
    manager.pool.arenas[0].pages[3].group_id = None


def miscount_held_blocks(manager: KVCacheManager) -> None:
    manager.pool.arenas[0].pages[4].num_held += 1


def miscount_spare_blocks(manager: KVCacheManager) -> None:
    manager.pool.arenas[0].groups[0].num_spare += 1


def invent_a_page_with_free_blocks(manager: KVCacheManager) -> None:
    manager.pool.arenas[0].groups[0].held_with_free[4] = manager.pool.arenas[0].pages[4]


def cache_an_unknown_block(manager: KVCacheManager) -> None:
    stranger = KVCacheBlock(3, 0, manager.pool.arenas[0].pages[3], key=(1, 99))
    manager.pool.arenas[0].groups[0].cached.append(stranger)


def keep_a_block_of_a_reassigned_page(manager: KVCacheManager) -> None:
    gone = KVCacheBlock(6, 0, manager.pool.arenas[0].pages[6], ref_cnt=1)
    manager.coordinator.managers[0].block_tables["live"].append(gone)


def lose_a_hash(manager: KVCacheManager) -> None:
    del manager.pool.hash_tables[0][hashes_of(PROMPT, 4)[1]]


def misdirect_a_hash(manager: KVCacheManager) -> None:
    wrong = held_block(manager.pool, 1)
    manager.pool.hash_tables[0][hashes_of(PROMPT, 4)[1]] = wrong


def forget_an_older_block(manager: KVCacheManager) -> None:
    del equal_content_twice(manager)[:]


def repeat_an_older_block(manager: KVCacheManager) -> None:
    older = equal_content_twice(manager)
    older.append(older[0])


def mistake_an_older_block(manager: KVCacheManager) -> None:
    older = equal_content_twice(manager)
    older[0] = held_block(manager.pool, 5)


def release_an_older_block(manager: KVCacheManager) -> None:
    """Release a block without removing it from the list of older duplicates."""
    (older,) = equal_content_twice(manager)
    manager.pool.arenas[0].release(older, 1)
    manager.coordinator.managers[0].block_tables["live"][0] = manager.pool.null_block(0)


def skip_a_generation(manager: KVCacheManager) -> None:
    manager.pool.generations(0)[4] += 1


def use_the_null_block(manager: KVCacheManager) -> None:
    manager.pool.null_block(0).generation = 1


def orphan_a_pending_hash(manager: KVCacheManager) -> None:
    manager.pending.add("ghost", hashes_of([7] * 4, 4))


def orphan_a_table(manager: KVCacheManager) -> None:
    manager.coordinator.managers[0].block_tables["ghost"] = []


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (
            lose_a_free_page,
            r"free \(2\) \+ held \(2\) \+ cached \(3\) \+ null \(1\) = 8, expected num_pages = 9",
        ),
        (leak_a_reference, r"block 4 .*: ref_cnt \(2\) != places in block tables \(1\)"),
        (forget_a_reference, r"block 4 .*: ref_cnt \(0\) != places in block tables \(1\)"),
        (
            list_a_cached_block_as_free,
            r"block 3 of group 0 \(ref_cnt 0, hash [0-9a-f]{12}\): \(free, cached\) = "
            r"\(True, False\), expected \(False, True\)",
        ),
        (lose_an_unheld_page, r"free \(3\) \+ held \(2\) \+ cached \(2\) \+ null \(1\) = 8"),
        (clear_the_group_of_a_page, r"page 3 of group None: blocks \(1\) != blocks per page \(0\)"),
        (miscount_held_blocks, r"large page 4 of group 0: num_held \(2\) != held blocks \(1\)"),
        (miscount_spare_blocks, r"group 0: num_spare \(1\) != .* no request holds \(0\)"),
        (invent_a_page_with_free_blocks, r"held_with_free \(\[4\]\) != such pages \(\[\]\)"),
        (cache_an_unknown_block, r"group 0: cached queue \(4\) != cached blocks \(3\)"),
        (keep_a_block_of_a_reassigned_page, r"block 6 of group 0 .* gone to others"),
        (
            lose_a_hash,
            r"blocks with a hash \(4\) != hash table entries \(3\) \+ older .* content \(0\)",
        ),
        (forget_an_older_block, r"older blocks .*distinct .*\(1\) != older ones \(0\) \+ 1, or"),
        (repeat_an_older_block, r"older blocks .*distinct .*\(2\) != older ones \(2\) \+ 1, or"),
        (mistake_an_older_block, r"older blocks .*: block 5 has \(group 0, None\) and ref_cnt \(1"),
        (release_an_older_block, r"older blocks .*: block 4 has .* and ref_cnt \(0\), expected"),
        (misdirect_a_hash, r"hash table entry \(group 0, [0-9a-f]{12}\) leads to block 1, which"),
        (skip_a_generation, r"block 4 .*: generation \(1\) != generations\[4\] \(2\)"),
        (use_the_null_block, r"null block of group 0: ref_cnt \(0\), generation \(1\)"),
        (orphan_a_pending_hash, r"pending of \['ghost'\].*\['live'\]"),
        (orphan_a_table, r"table in group 0 \['ghost', 'live'\] != live requests \['live'\]"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_corruption_is_reported(corrupt: Callable[[KVCacheManager], None], message: str):
    manager = healthy_manager()
    corrupt(manager)
    with pytest.raises(IntegrityError, match=message):
        check_integrity(manager)
