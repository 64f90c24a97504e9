"""Who gets which block next, and what can be found."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_cache import BlockHash, BlockPool, KVCacheBlock, check_pool_integrity
from prefix_cache.blocks.block_pool import (
    HIGH_PRIORITY,
    LOW_PRIORITY,
    REUSED_PRIORITY,
    EvictionQueue,
    PageArena,
)


def digest(index: int) -> BlockHash:
    return BlockHash(index.to_bytes(32))


def ids(blocks) -> list[int]:
    return [block.block_id for block in blocks]


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
    assert pool.num_free() == 3
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


def test_every_hand_out_is_a_new_generation():
    pool = BlockPool.uniform(3)
    for generation in (1, 2, 3):
        (block, other) = pool.allocate({0: 2})[0]
        assert (block.generation, other.generation) == (generation, generation)
        assert pool.generations(0).tolist() == [0, generation, generation]
        pool.release([block, other])


def test_a_free_block_without_content_cannot_be_shared():
    pool = BlockPool.uniform(3)
    (block,) = pool.allocate({0: 1})[0]
    pool.release([block])
    with pytest.raises(ValueError, match="block 1 is free and holds no content"):
        pool.touch(block)


def several_of_one_content(pool: BlockPool, count: int) -> list[KVCacheBlock]:
    blocks = pool.allocate({0: count})[0]
    for block in blocks:
        pool.publish(block, digest(1))
    return blocks


def test_a_copy_that_was_worth_more_keeps_its_priority():
    pool = BlockPool.uniform(4)
    older, newest = several_of_one_content(pool, 2)
    pool.release([newest], HIGH_PRIORITY)
    pool.release([older], LOW_PRIORITY)
    assert newest.key[0] == REUSED_PRIORITY
    older, newest = several_of_one_content(pool, 2)
    pool.release([newest], LOW_PRIORITY)
    pool.release([older], HIGH_PRIORITY)
    assert newest.key[0] == REUSED_PRIORITY
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
    with pytest.raises(ValueError, match="block 1 is released, but not held"):
        pool.release([block])


BLOCK_SIZE = 4


def put(pool: BlockPool, group_id: int, indices: list[int], priority: int = HIGH_PRIORITY) -> None:
    """Cache blocks under these digests, the first of them to be evicted first."""
    blocks = pool.allocate({group_id: len(indices)})[group_id]
    for index, block in zip(indices, blocks, strict=True):
        pool.publish(block, digest(index))
    pool.release(blocks, priority)


def found(pool: BlockPool, num_groups: int) -> set[tuple[int, int]]:
    return {(g, i) for g in range(num_groups) for i in range(99) if pool.lookup(g, digest(i))}


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["use", "demote", "renew"]),
        st.integers(0, 11),
        st.sampled_from([LOW_PRIORITY, HIGH_PRIORITY]),
    ),
    max_size=30,
)


def next_evicted(order: dict[tuple[int, int], tuple[int, int]]) -> tuple[int, int]:
    """The oldest of the priority that has most blocks; of two with as many, the lower one."""
    counts = Counter(priority for priority, _ in order.values())
    most = min(counts, key=lambda priority: (-counts[priority], priority))
    return min((key for key in order if order[key][0] == most), key=order.__getitem__)


@given(events=EVENTS, takers=st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_pages_of_one_block_go_in_exactly_one_order_whoever_takes_them(events, takers):
    pool = BlockPool([PageArena(13, {0: 1, 1: 1, 2: 1})])
    order: dict[tuple[int, int], tuple[int, int]] = {}  # content to (priority, time of last use)
    for index in range(12):
        put(pool, index % 3, [index])
        order[index % 3, index] = (HIGH_PRIORITY, index)
    for time, (event, index, priority) in enumerate(events, start=12):
        block = pool.lookup(index % 3, digest(index))
        if event == "use":
            pool.touch(block)
            pool.release([block], priority)
            order[index % 3, index] = (REUSED_PRIORITY if priority else LOW_PRIORITY, time)
        elif event == "renew":
            pool.renew(block, digest(index))
            order[index % 3, index] = (order[index % 3, index][0], time)
        else:
            pool.demote(block)
            if order[index % 3, index][0] != LOW_PRIORITY:
                order[index % 3, index] = (LOW_PRIORITY, time)
    blocks = []
    for count, group_id in enumerate(takers, start=1):
        blocks += pool.allocate({group_id: 1})[group_id]
        del order[next_evicted(order)]
        assert found(pool, 3) == set(order)
        assert pool.num_evictions == count
    check_pool_integrity(pool, [blocks])


def test_a_group_gives_up_its_own_block_or_another_groups_page_whichever_is_older():
    pool = BlockPool([PageArena(3, {0: 2, 1: 3})])
    put(pool, 0, [1, 2])
    put(pool, 1, [11, 12, 13])
    assert not pool.arenas[0].free_pages
    block = pool.allocate({1: 1})[1]
    assert found(pool, 2) == {(1, 11), (1, 12), (1, 13)}, "the page of group 0 was older"
    pool.release(block)
    # It was given back whole.
    put(pool, 0, [1, 2])
    block = pool.allocate({0: 1})[0]
    assert found(pool, 2) == {(0, 1), (0, 2)}, "the page of group 1 was older"
    pool.release(block)
    put(pool, 1, [11, 12, 13])
    pool.release([*pool.allocate({0: 1})[0]])
    assert found(pool, 2) == {(0, 2), (1, 11), (1, 12), (1, 13)}, "its own was the oldest"
    check_pool_integrity(pool, [])


def test_free_blocks_go_before_content_and_half_used_pages_before_whole_ones():
    pool = BlockPool([PageArena(4, {0: 3, 1: 2})])
    put(pool, 0, [1])
    assert pool.arenas[0].num_available == 3 and len(pool.arenas[0].free_pages) == 2
    blocks = pool.allocate({0: 2})[0]
    assert [block.block_id for block in blocks] == [4, 5], "beside the content of page 1"
    assert found(pool, 1) == {(0, 1)} and len(pool.arenas[0].free_pages) == 2
    more = pool.allocate({1: 4})[1]
    assert [block.large_page.page_id for block in more] == [2, 2, 3, 3]
    assert pool.num_free(0) == 1 and pool.num_free(1) == 0
    assert not pool.can_allocate({1: 1})
    assert pool.allocate({0: 1})[0][0].block_id == 3 and not found(pool, 1)


def test_a_demoted_page_goes_before_an_older_one():
    pool = BlockPool([PageArena(3, {0: 2, 1: 3})])
    put(pool, 0, [1, 2])
    put(pool, 1, [11, 12, 13])
    for index in (11, 12):
        pool.demote(pool.lookup(1, digest(index)))
    assert [page.page_id for page in pool.arenas[0].unheld] == [1, 2], "13 is still worth keeping"
    pool.demote(pool.lookup(1, digest(13)))
    assert [page.page_id for page in pool.arenas[0].unheld] == [2, 1]
    pool.allocate({0: 1})
    assert found(pool, 2) == {(0, 1), (0, 2)}


def test_content_that_was_of_use_outlives_a_scan_of_ten_times_the_pool():
    pool = BlockPool.uniform(31)
    put(pool, 0, list(range(10)))
    for index in range(10):
        block = pool.lookup(0, digest(index))
        pool.touch(block)
        pool.release([block])
    for index in range(100, 400, 3):
        put(pool, 0, [index, index + 1, index + 2])
    assert found(pool, 1) >= {(0, index) for index in range(10)}


def test_what_is_missed_is_kept_longer_from_then_on():
    def survivors(missed: int) -> int:
        """Blocks of low priority that are left when as many of high priority have come."""
        pool = BlockPool.uniform(31)
        put(pool, 0, list(range(60, 90)), LOW_PRIORITY)
        put(pool, 0, list(range(10)))
        for index in range(60, 60 + missed):
            pool.miss(0, digest(index), 1.0)
        for index in range(10, 40):
            put(pool, 0, [index])
        return sum(pool.lookup(0, digest(index)) is not None for index in range(60, 90))

    assert survivors(0) < survivors(1) <= survivors(8)


def test_what_was_evicted_long_ago_is_not_missed():
    pool = BlockPool.uniform(5)
    put(pool, 0, [0], LOW_PRIORITY)
    for index in range(1, 12):
        put(pool, 0, [index])
    shares = tuple(pool.arenas[0].shares)
    pool.miss(0, digest(0), 1.0)
    assert tuple(pool.arenas[0].shares) == shares
    pool.miss(0, digest(7), 1.0)
    assert tuple(pool.arenas[0].shares) != shares


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 100)), max_size=200))
def test_no_kind_of_content_ever_loses_all_of_its_share(misses):
    arena = PageArena(9, {0: 1})
    for priority, weight in misses:
        arena.reward(priority, weight)
        assert sum(arena.shares) == pytest.approx(1, abs=0.01) and min(arena.shares) > 0
