"""Who gets which block next, and what can be found."""

from __future__ import annotations

import pytest

from prefix_cache import BlockHash, BlockPool, KVCacheBlock, check_pool_integrity
from prefix_cache.blocks.block_pool import HIGH_PRIORITY, LOW_PRIORITY, EvictionQueue, PageArena
from tests.support.tiny_kv_cache import cached_ids


def digest(index: int) -> BlockHash:
    return BlockHash(bytes([index]) * 32)


def ids(blocks) -> list[int]:
    return [block.block_id for block in blocks]


def cache_blocks(pool: BlockPool, num_blocks: int) -> list[KVCacheBlock]:
    """Allocate, publish under digest(block id) and release, in order of ids."""
    blocks = pool.allocate({0: num_blocks})[0]
    for block in blocks:
        pool.publish(block, digest(block.block_id))
    pool.release(blocks)
    return blocks


def test_queue_goes_by_priority_then_time_and_removes_from_anywhere():
    queue: EvictionQueue[KVCacheBlock] = EvictionQueue()
    keys = [(1, 1), (1, 2), (0, 3), (1, 4), (0, 5)]
    blocks = [KVCacheBlock(index, 0, None, key=key) for index, key in enumerate(keys)]
    assert queue.first is None
    for block in blocks[:4]:
        queue.append(block)
    assert ids(queue) == [2, 0, 1, 3] and len(queue) == 4 and queue.first is blocks[2]
    queue.append(blocks[4])
    assert ids(queue) == [2, 4, 0, 1, 3], "a later one of low priority goes before all others"
    queue.remove(blocks[1])
    assert blocks[1] not in queue and blocks[3] in queue
    assert ids(queue) == [2, 4, 0, 3]
    with pytest.raises(KeyError):
        queue.remove(blocks[1])


def test_a_pool_needs_a_block_beside_the_null_block():
    with pytest.raises(ValueError, match=r"at least 2 .*got 1"):
        BlockPool.uniform(1)


def test_the_null_block_is_never_handed_out_nor_held():
    pool = BlockPool.uniform(4)
    assert pool.usable_blocks() == pool.num_free() == 3
    blocks = pool.allocate({0: 3})[0]
    assert ids(blocks) == [1, 2, 3]
    with pytest.raises(ValueError, match=r"wanted per group \{0: 1\}, free are at most \{0: 0\}"):
        pool.allocate({0: 1})
    null = pool.null_block(0)
    with pytest.raises(ValueError, match="null block cannot be held"):
        pool.touch(null)
    pool.release([null, blocks[0], null])
    assert (null.ref_cnt, null.generation, pool.num_free()) == (0, 0, 1)
    check_pool_integrity(pool, [[*blocks[1:], null]])


def test_too_large_an_allocation_changes_nothing():
    pool = BlockPool.uniform(4)
    cache_blocks(pool, 2)
    with pytest.raises(ValueError, match=r"wanted per group \{0: 4\}, free are at most \{0: 3\}"):
        pool.allocate({0: 4})
    assert pool.num_free() == 3 and len(pool.hash_tables[0]) == 2
    check_pool_integrity(pool, [])


def test_every_hand_out_is_a_new_generation():
    pool = BlockPool.uniform(3)
    for generation in (1, 2, 3):
        (block, other) = pool.allocate({0: 2})[0]
        assert (block.generation, other.generation) == (generation, generation)
        assert pool.generations(0).tolist() == [0, generation, generation]
        pool.release([block, other])


def test_blocks_without_content_go_first_then_the_least_recently_used():
    pool = BlockPool.uniform(6)
    cached = cache_blocks(pool, 3)
    (bare,) = pool.allocate({0: 1})[0]
    assert bare.block_id == 4, "untouched blocks are taken before cached ones"
    pool.release([bare])
    # Used again: block 1 is now the most recently used of the cached.
    pool.touch(cached[0])
    pool.release([cached[0]])
    assert ids(pool.allocate({0: 5})[0]) == [4, 5, 2, 3, 1]
    assert pool.num_evictions == 3 and not pool.hash_tables[0]


def test_released_in_reverse_the_tail_is_evicted_first():
    pool = BlockPool.uniform(4)
    table = pool.allocate({0: 3})[0]
    for block in table:
        pool.publish(block, digest(block.block_id))
    pool.release(reversed(table))
    pool.allocate({0: 1})
    assert [pool.lookup(0, digest(i)) is not None for i in (1, 2, 3)] == [True, True, False]


def test_a_shared_block_waits_for_its_last_holder():
    pool = BlockPool.uniform(3)
    (block,) = pool.allocate({0: 1})[0]
    pool.publish(block, digest(1))
    pool.touch(block)
    pool.release([block])
    assert block.ref_cnt == 1 and cached_ids(pool) == []
    pool.release([block])
    assert cached_ids(pool) == [1]
    with pytest.raises(ValueError, match="block 1 is released, but not held"):
        pool.release([block])


def test_a_free_block_without_content_cannot_be_shared():
    pool = BlockPool.uniform(3)
    (block,) = pool.allocate({0: 1})[0]
    pool.release([block])
    with pytest.raises(ValueError, match="block 1 is free and holds no content"):
        pool.touch(block)


def test_lookup_keeps_groups_apart():
    pool = BlockPool([PageArena(3, {0: 1, 7: 1})])
    (block,) = pool.allocate({7: 1})[7]
    pool.publish(block, digest(1))
    assert pool.lookup(7, digest(1)) is block
    assert pool.lookup(0, digest(1)) is None


@pytest.mark.parametrize("older_is_held", [True, False])
def test_the_newest_block_of_a_hash_wins(older_is_held):
    pool = BlockPool.uniform(5)
    older, newer = pool.allocate({0: 2})[0]
    pool.publish(older, digest(1))
    if not older_is_held:
        pool.release([older])
    pool.publish(newer, digest(1))
    assert pool.lookup(0, digest(1)) is newer
    assert older.block_hash == (digest(1) if older_is_held else None)
    check_pool_integrity(pool, [[older, newer]] if older_is_held else [[newer]])
    if not older_is_held:
        # It holds what is found elsewhere: it goes before blocks never used.
        assert ids(pool.allocate({0: 1})[0]) == ids([older])


def several_of_one_content(pool: BlockPool, count: int) -> list[KVCacheBlock]:
    blocks = pool.allocate({0: count})[0]
    for block in blocks:
        pool.publish(block, digest(1))
    return blocks


def test_an_older_block_that_is_held_is_found_again_when_the_newest_is_evicted():
    pool = BlockPool.uniform(4)
    oldest, older, newest = several_of_one_content(pool, 3)
    held = {oldest, older, newest}
    for gone, found in ((newest, older), (older, oldest)):
        pool.release([gone])
        assert pool.lookup(0, digest(1)) is gone, "cached, until its place is needed"
        (other,) = pool.allocate({0: 1})[0]
        assert other.block_id == gone.block_id and pool.lookup(0, digest(1)) is found
        pool.publish(found, digest(1))  # that it is found already changes nothing
        held = held - {gone} | {other}
        check_pool_integrity(pool, [list(held)])
    pool.release([oldest])
    assert cached_ids(pool) == ids([oldest]) and not pool.older


def test_content_that_no_table_holds_is_kept_once_and_counts_as_used_when_the_last_let_it_go():
    pool = BlockPool.uniform(5)
    older, newest = several_of_one_content(pool, 2)
    (other,) = pool.allocate({0: 1})[0]
    pool.publish(other, digest(2))
    pool.release([newest, other])
    assert cached_ids(pool) == ids([newest, other])
    pool.release([older])
    assert older.block_hash is None and not pool.older
    assert cached_ids(pool) == ids([other, newest]), "it was in use longer than the other"
    assert ids(pool.allocate({0: 3})[0]) == [older.block_id, 4, other.block_id]
    assert pool.lookup(0, digest(1)) is newest


def test_a_copy_that_was_worth_more_keeps_its_priority():
    pool = BlockPool.uniform(4)
    older, newest = several_of_one_content(pool, 2)
    pool.release([newest], HIGH_PRIORITY)
    pool.release([older], LOW_PRIORITY)
    assert newest.key[0] == HIGH_PRIORITY
    older, newest = several_of_one_content(pool, 2)
    pool.release([newest], LOW_PRIORITY)
    pool.release([older], HIGH_PRIORITY)
    assert newest.key[0] == HIGH_PRIORITY
    check_pool_integrity(pool, [])


def test_publishing_twice_is_once_and_another_hash_is_an_error():
    pool = BlockPool.uniform(3)
    (block,) = pool.allocate({0: 1})[0]
    pool.publish(block, digest(1))
    pool.publish(block, digest(1))
    assert len(pool.hash_tables[0]) == 1
    with pytest.raises(ValueError, match=r"block 1 .* under another hash"):
        pool.publish(block, digest(2))
    pool.release([block])
    with pytest.raises(ValueError, match="block 1 is published, but not held"):
        pool.publish(block, digest(1))


def test_reset_forgets_content_and_keeps_references():
    pool = BlockPool.uniform(6)
    cache_blocks(pool, 2)
    held = pool.allocate({0: 1})[0]
    pool.publish(held[0], digest(9))
    twins = several_of_one_content(pool, 2)
    pool.reset()
    assert not pool.hash_tables[0] and not pool.older and cached_ids(pool) == []
    assert pool.num_free() == 2 and held[0].ref_cnt == 1
    check_pool_integrity(pool, [held, twins])
    assert pool.num_evictions == 0
