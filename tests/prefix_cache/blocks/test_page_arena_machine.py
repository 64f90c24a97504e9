"""Any sequence of events over groups of coprime page sizes: nothing leaks, nothing fragments.

The model counts from the blocks themselves: which large pages somebody holds a block of, and
which blocks of a group's held pages are not held. What groups can have follows from that alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from prefix_cache import BlockHash, BlockPool, KVCacheBlock, check_pool_integrity
from prefix_cache.blocks.block_pool import HIGH_PRIORITY, LOW_PRIORITY, PageArena
from tests.support.examples import examples
from tests.support.tiny_kv_cache import GROUP_MIXES, mixed_config

NUM_LARGE_PAGES = 6
INDICES = st.integers(0, 30)
FEW = st.lists(st.sampled_from([0, 1, 2, 3]), min_size=6, max_size=6)
MANY = st.lists(st.sampled_from([0, 2, 5, 11, 16]), min_size=6, max_size=6)

Tables = dict[int, list[KVCacheBlock]]


def digest(index: int) -> BlockHash:
    return BlockHash(bytes([index]) * 32)


def can_have(
    arena: PageArena, needs: Mapping[int, int], revived: Iterable[KVCacheBlock] = ()
) -> bool:
    """Whether whole pages that nobody holds make up for what the held ones lack."""
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
    """Requests of all groups of a mix allocate, grow, publish, hit, demote and go."""

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
        """A request comes, publishes and goes, but for the first few blocks of its tables."""
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
        """All or nothing, exactly when the model says so; hits are touched first."""
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
            assert not held & set(blocks), "nobody else holds them"
            assert all(b.block_hash is None and b.group_id == group_id for b in blocks)
            tables.setdefault(group_id, []).extend(blocks)
            for with_content in self.published.values():
                with_content.difference_update(blocks)
        self.requests.append(tables)

    def snapshot(self) -> list[object]:
        """All that a refused call must leave as it was."""
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
                    assert own == sorted(own), "of one priority, the oldest is evicted first"

    @invariant()
    def content_is_found_as_long_as_any_block_of_it_is_there(self) -> None:
        """Held by anybody, or cached since; never a block of other content, nor one handed out."""
        held = {b for tables in self.requests for table in tables.values() for b in table}
        for (group_id, content), blocks in self.published.items():
            found = self.pool.lookup(group_id, content)
            assert found in blocks if found is not None else not held & blocks
        cached = {b for arena in self.pool.arenas for g in arena.groups.values() for b in g.cached}
        assert cached <= {block for blocks in self.published.values() for block in blocks}
        contents = [(block.group_id, block.block_hash) for block in cached]
        assert len(contents) == len(set(contents)), "what nobody holds is kept once"

    def teardown(self) -> None:
        """When all are gone every page is free or cached, and any group can have all of them."""
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
