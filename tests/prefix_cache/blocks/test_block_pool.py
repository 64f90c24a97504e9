"""Order of allocation and eviction; no sequence of events leaks or fragments blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefix_cache import BlockHash, BlockPool, KVCacheBlock, check_pool_integrity
from prefix_cache.blocks.block_pool import HIGH_PRIORITY, LOW_PRIORITY, REUSED_PRIORITY, PageArena
from tests.support.examples import examples
from tests.support.tiny_kv_cache import GROUP_MIXES, mixed_config


def digest(index: int) -> BlockHash:
    return BlockHash(index.to_bytes(32))


def ids(blocks) -> list[int]:
    return [block.block_id for block in blocks]


def test_a_pool_needs_a_block_in_addition_to_the_null_block():
    with pytest.raises(ValueError, match=r"at least 2 .*got 1"):
        BlockPool.uniform(1)


def test_the_null_block_is_never_allocated_or_held():
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


def test_a_duplicate_keeps_the_highest_priority():
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


def test_publishing_again_is_a_no_op_and_another_hash_is_an_error():
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
    """Cache blocks under these digests, to be evicted in this order."""
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
    """Return the oldest block of the priority with most blocks; the lower priority on a tie."""
    counts = Counter(priority for priority, _ in order.values())
    most = min(counts, key=lambda priority: (-counts[priority], priority))
    return min((key for key in order if order[key][0] == most), key=order.__getitem__)


@given(events=EVENTS, takers=st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_pages_of_one_block_are_evicted_in_one_order_for_all_groups(events, takers):
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


def test_the_older_of_an_own_block_and_another_groups_page_is_evicted():
    pool = BlockPool([PageArena(3, {0: 2, 1: 3})])
    put(pool, 0, [1, 2])
    put(pool, 1, [11, 12, 13])
    assert not pool.arenas[0].free_pages
    block = pool.allocate({1: 1})[1]
    assert found(pool, 2) == {(1, 11), (1, 12), (1, 13)}, "the page of group 0 was older"
    pool.release(block)
    # The whole page was released.
    put(pool, 0, [1, 2])
    block = pool.allocate({0: 1})[0]
    assert found(pool, 2) == {(0, 1), (0, 2)}, "the page of group 1 was older"
    pool.release(block)
    put(pool, 1, [11, 12, 13])
    pool.release([*pool.allocate({0: 1})[0]])
    assert found(pool, 2) == {(0, 2), (1, 11), (1, 12), (1, 13)}, "its own was the oldest"
    check_pool_integrity(pool, [])


def test_free_blocks_are_used_before_cached_ones_and_half_used_pages_before_whole_ones():
    pool = BlockPool([PageArena(4, {0: 3, 1: 2})])
    put(pool, 0, [1])
    assert pool.arenas[0].num_available == 3 and len(pool.arenas[0].free_pages) == 2
    blocks = pool.allocate({0: 2})[0]
    assert [block.block_id for block in blocks] == [4, 5], "next to the content of page 1"
    assert found(pool, 1) == {(0, 1)} and len(pool.arenas[0].free_pages) == 2
    more = pool.allocate({1: 4})[1]
    assert [block.large_page.page_id for block in more] == [2, 2, 3, 3]
    assert pool.num_free(0) == 1 and pool.num_free(1) == 0
    assert not pool.can_allocate({1: 1})
    assert pool.allocate({0: 1})[0][0].block_id == 3 and not found(pool, 1)


def test_a_demoted_page_is_evicted_before_an_older_one():
    pool = BlockPool([PageArena(3, {0: 2, 1: 3})])
    put(pool, 0, [1, 2])
    put(pool, 1, [11, 12, 13])
    for index in (11, 12):
        pool.demote(pool.lookup(1, digest(index)))
    assert [page.page_id for page in pool.arenas[0].unheld] == [1, 2], "13 still has high priority"
    pool.demote(pool.lookup(1, digest(13)))
    assert [page.page_id for page in pool.arenas[0].unheld] == [2, 1]
    pool.allocate({0: 1})
    assert found(pool, 2) == {(0, 1), (0, 2)}


def test_reused_content_survives_a_scan_of_ten_times_the_pool():
    pool = BlockPool.uniform(31)
    put(pool, 0, list(range(10)))
    for index in range(10):
        block = pool.lookup(0, digest(index))
        pool.touch(block)
        pool.release([block])
    for index in range(100, 400, 3):
        put(pool, 0, [index, index + 1, index + 2])
    assert found(pool, 1) >= {(0, index) for index in range(10)}


def test_missed_content_is_kept_longer_afterwards():
    def survivors(missed: int) -> int:
        """Count low-priority blocks left after as many high-priority blocks were cached."""
        pool = BlockPool.uniform(31)
        put(pool, 0, list(range(60, 90)), LOW_PRIORITY)
        put(pool, 0, list(range(10)))
        for index in range(60, 60 + missed):
            pool.miss(0, digest(index), 1.0)
        for index in range(10, 40):
            put(pool, 0, [index])
        return sum(pool.lookup(0, digest(index)) is not None for index in range(60, 90))

    assert survivors(0) < survivors(1) <= survivors(8)


def test_content_evicted_long_ago_counts_as_no_miss():
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
def test_no_priority_loses_all_of_its_share(misses):
    arena = PageArena(9, {0: 1})
    for priority, weight in misses:
        arena.reward(priority, weight)
        assert sum(arena.shares) == pytest.approx(1, abs=0.01) and min(arena.shares) > 0


NUM_LARGE_PAGES = 6
INDICES = st.integers(0, 30)
FEW = st.lists(st.sampled_from([0, 1, 2, 3]), min_size=6, max_size=6)
MANY = st.lists(st.sampled_from([0, 2, 5, 11, 16]), min_size=6, max_size=6)

Tables = dict[int, list[KVCacheBlock]]


def can_have(
    arena: PageArena, needs: Mapping[int, int], revived: Iterable[KVCacheBlock] = ()
) -> bool:
    """Return True if whole unheld pages suffice for what held pages lack."""
    touched = set(revived)
    whole_pages, spare = 0, dict.fromkeys(arena.groups, 0)
    for page in arena.pages[1:]:
        held = sum(block.ref_cnt > 0 or block in touched for block in page.blocks)
        if held == 0:
            whole_pages += 1
        else:
            spare[page.blocks[0].group_id] += len(page.blocks) - held
    for group_id, group in arena.groups.items():
        lacking = needs.get(group_id, 0) - spare[group_id]
        while lacking > 0:
            whole_pages -= 1
            lacking -= group.blocks_per_page
    return whole_pages >= 0


class PagesMachine(RuleBasedStateMachine):
    """Requests of all groups of a mix allocate, grow, publish, hit, demote and finish."""

    mix = "three_full"

    @initialize()
    def start(self) -> None:
        config = mixed_config(GROUP_MIXES[self.mix], NUM_LARGE_PAGES, 2, num_host_blocks=9)
        self.pool = BlockPool.for_config(config)
        self.num_groups = len(config.groups)
        self.requests: list[Tables] = []
        self.published: dict[tuple[int, BlockHash], set[KVCacheBlock]] = {}

    # Events.

    @rule(counts=st.one_of(FEW, MANY))
    def arrive(self, counts: list[int]) -> None:
        self.allocate({}, dict(zip(range(self.num_groups), counts, strict=False)), ())

    @precondition(lambda self: self.requests)
    @rule(index=INDICES, counts=st.one_of(FEW, MANY))
    def grow(self, index: int, counts: list[int]) -> None:
        tables = self.requests.pop(index % len(self.requests))
        self.allocate(tables, dict(zip(range(self.num_groups), counts, strict=False)), ())

    @rule(first=st.integers(0, 11), length=st.integers(1, 6), counts=st.one_of(FEW, MANY))
    def hit(self, first: int, length: int, counts: list[int]) -> None:
        keys = [
            (g, digest(i)) for i in range(first, first + length) for g in range(self.num_groups)
        ]
        found = [self.pool.lookup(*key) for key in keys]
        hits = [block for block in found if block is not None]
        needs = dict(zip(range(self.num_groups), counts, strict=False))
        self.allocate({}, needs, hits)

    @precondition(lambda self: self.requests)
    @rule(index=INDICES, first=INDICES)
    def publish(self, index: int, first: int) -> None:
        self.publish_tables(self.requests[index % len(self.requests)], first)

    @rule(counts=st.one_of(FEW, MANY), first=INDICES, lasting=st.integers(0, 2))
    def serve(self, counts: list[int], first: int, lasting: int) -> None:
        """A request arrives, publishes and frees all but the first few blocks of its tables."""
        num_requests = len(self.requests)
        self.allocate({}, dict(zip(range(self.num_groups), counts, strict=False)), ())
        if len(self.requests) > num_requests:
            tables = self.requests[-1]
            self.publish_tables(tables, first)
            for table in tables.values():
                self.pool.release(reversed(table[lasting:]))
                del table[lasting:]

    @precondition(lambda self: self.requests)
    @rule(index=INDICES, priority=st.sampled_from([LOW_PRIORITY, HIGH_PRIORITY]))
    def finish(self, index: int, priority: int) -> None:
        for table in self.requests.pop(index % len(self.requests)).values():
            self.pool.release(reversed(table), priority)

    @precondition(lambda self: self.requests)
    @rule(index=INDICES, group=INDICES, count=st.integers(1, 4))
    def move_a_window_on(self, index: int, group: int, count: int) -> None:
        table = self.requests[index % len(self.requests)].get(group % self.num_groups, [])
        self.pool.release(table[:count], LOW_PRIORITY)
        del table[:count]

    @rule(index=INDICES, group=INDICES)
    def demote(self, index: int, group: int) -> None:
        block = self.pool.lookup(group % self.num_groups, digest(index % 12))
        if block is not None:
            self.pool.demote(block)

    @rule(index=INDICES, group=INDICES, weight=st.floats(0, 9))
    def miss(self, index: int, group: int, weight: float) -> None:
        content = digest(index % 12)
        block = self.pool.lookup(group % self.num_groups, content)
        if block is None:
            self.pool.miss(group % self.num_groups, content, weight)
        else:
            self.pool.renew(block, content)

    @rule(really=st.integers(0, 9))
    def reset(self, really: int) -> None:
        if really == 9:
            self.pool.reset()
            self.published.clear()

    # Parts of events.

    def publish_tables(self, tables: Tables, first: int) -> None:
        for table in tables.values():
            for offset, block in enumerate(table):
                if block.block_hash is None:
                    content = digest((first + offset) % 12)
                    self.pool.publish(block, content)
                    self.published.setdefault((block.group_id, content), set()).add(block)

    def allocate(self, tables: Tables, needs: dict[int, int], hits: Sequence[KVCacheBlock]) -> None:
        """Allocate all or nothing, exactly as the model predicts; hits are touched first."""
        possible = all(can_have(arena, needs, hits) for arena in self.pool.arenas)
        before = self.snapshot()
        assert self.pool.can_allocate(needs, [hits]) == possible
        assert self.snapshot() == before
        if not possible:
            if not hits:
                with pytest.raises(ValueError, match="blocks wanted per group"):
                    self.pool.allocate(needs)
                assert self.snapshot() == before
            if tables:
                self.requests.append(tables)
            return
        for block in hits:
            self.pool.touch(block)
            tables.setdefault(block.group_id, []).append(block)
        near = {g: table[-1].large_page for g, table in tables.items() if table}
        held = {b for request in [*self.requests, tables] for t in request.values() for b in t}
        for group_id, blocks in self.pool.allocate(needs, near).items():
            assert len(blocks) == len(set(blocks)) == needs[group_id]
            assert not held & set(blocks), "no other request holds them"
            assert all(b.block_hash is None and b.group_id == group_id for b in blocks)
            tables.setdefault(group_id, []).extend(blocks)
            for with_content in self.published.values():
                with_content.difference_update(blocks)
        self.requests.append(tables)

    def snapshot(self) -> list[object]:
        """Return all state that a refused call must not change."""
        state: list[object] = [
            {g: dict(found) for g, found in self.pool.hash_tables.items()},
            self.pool.num_evictions,
        ]
        for arena in self.pool.arenas:
            state.append([page.page_id for page in arena.free_pages])
            state.append([page.page_id for page in arena.unheld])
            for page in arena.pages:
                blocks = [(b.block_id, b.ref_cnt, b.block_hash, b.key) for b in page.blocks]
                free = [block.block_id for block in page.free]
                state.append((page.group_id, page.num_held, blocks, free))
            for group in arena.groups.values():
                state.append((group.generations.tolist(), group.num_spare))
                state.append([block.block_id for block in group.cached])
        return state

    @invariant()
    def everything_adds_up(self) -> None:
        check_pool_integrity(
            self.pool, [table for tables in self.requests for table in tables.values()]
        )
        for arena in self.pool.arenas:
            queues = [[page.key for page in arena.unheld]]
            queues += [[block.key for block in group.cached] for group in arena.groups.values()]
            for keys in queues:
                for priority in range(3):
                    own = [key for key in keys if key[0] == priority]
                    assert own == sorted(own), "within a priority, the oldest is evicted first"

    @invariant()
    def content_is_found_as_long_as_any_block_of_it_is_there(self) -> None:
        """Content is found while a block with it is held or cached; never under other content."""
        held = {b for tables in self.requests for table in tables.values() for b in table}
        for (group_id, content), blocks in self.published.items():
            found = self.pool.lookup(group_id, content)
            assert found in blocks if found is not None else not held & blocks
        cached = {b for arena in self.pool.arenas for g in arena.groups.values() for b in g.cached}
        assert cached <= {block for blocks in self.published.values() for block in blocks}
        contents = [(block.group_id, block.block_hash) for block in cached]
        assert len(contents) == len(set(contents)), "content that no request holds is kept once"

    def teardown(self) -> None:
        """After all requests ended, every page is free or cached and usable by any group."""
        if not hasattr(self, "pool"):
            return
        while self.requests:
            self.finish(0, HIGH_PRIORITY)
        for arena in self.pool.arenas:
            assert len(arena.free_pages) + len(arena.unheld) == len(arena.pages) - 1
        for group_id in range(self.num_groups):
            count = self.pool.num_free(group_id)
            blocks = self.pool.allocate({group_id: count})[group_id]
            assert len({block.block_id for block in blocks}) == count
            check_pool_integrity(self.pool, [blocks])
            for block in blocks[: count // 2]:
                self.pool.publish(block, digest(100 + block.block_id % 100))
            self.pool.release(reversed(blocks))
            check_pool_integrity(self.pool, [])


def _machine(mix_name: str) -> Any:
    machine: Any = type(f"Pages_{mix_name}", (PagesMachine,), {"mix": mix_name})
    machine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=30)
    return machine.TestCase


TestCoprimePages = _machine("three_full")
TestEveryKindOfPage = _machine("all")
TestPagesOfStates = _machine("jamba")


def test_the_page_sizes_are_coprime() -> None:
    config = mixed_config(GROUP_MIXES["three_full"], NUM_LARGE_PAGES, 2)
    assert [config.pages_per_large_page(g) for g in range(3)] == [15, 10, 6]
