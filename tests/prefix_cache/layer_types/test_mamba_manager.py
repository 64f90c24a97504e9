"""States: ends of chunks, pages that a step reads and writes, states that stay cached."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from prefix_cache import CachedPrefix, KVCacheManager, check_integrity
from prefix_cache.layer_types.coordinator import ChunkStops
from tests.support.tiny_kv_cache import cached_ids, hashes_of, mixed_config

BLOCK_SIZE = 4
STATES = 0  # the group's id in the configurations here


def new_manager(num_pages: int = 40, budget: int = 64) -> KVCacheManager:
    config = mixed_config({"mamba": 1, "host": 1}, num_pages, BLOCK_SIZE)
    return KVCacheManager(config, max_num_batched_tokens=budget)


@dataclass
class Recurrence:
    """A recurrent model whose pages contain the tuple of all tokens that the state has seen."""

    manager: KVCacheManager
    pages: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def admit(self, request_id: str, token_ids: list[int], count: int) -> CachedPrefix:
        hashes = hashes_of(token_ids, BLOCK_SIZE)
        prefix = self.manager.find_cached_prefix(hashes, len(token_ids))
        count = min(count, len(token_ids) - prefix.num_tokens)
        if prefix.stops is not None:
            count = prefix.stops.clip(prefix.num_tokens, count, len(token_ids))
        end = prefix.num_tokens + count
        assert self.manager.allocate_slots(
            request_id,
            end,
            num_computed_tokens=prefix.num_tokens,
            prefix=prefix,
            block_hashes=hashes,
        )
        self.run(request_id, token_ids, prefix.num_tokens, end)
        return prefix

    def continue_with(self, request_id: str, token_ids: list[int], start: int, count: int) -> int:
        count = min(count, len(token_ids) - start)
        count = self.manager.clip_chunk(request_id, start, count, len(token_ids))
        end = start + count
        assert self.manager.allocate_slots(request_id, end, num_computed_tokens=start)
        self.run(request_id, token_ids, start, end)
        return end

    def run(self, request_id: str, token_ids: list[int], start: int, end: int) -> None:
        """Read one page, write one page, then publish, like engine.attention.layer."""
        table = self.manager.block_ids(request_id, STATES)
        state: tuple[int, ...] = ()
        if start:
            state = self.pages[table[(start - 1) // BLOCK_SIZE]]
            assert table[(start - 1) // BLOCK_SIZE] != 0
        assert state == tuple(token_ids[:start]), "a step continues from the request's own state"
        page = table[(end - 1) // BLOCK_SIZE]
        findable = {b.block_id for b in self.manager.pool.hash_tables[STATES].values()}
        assert page != 0 and page not in findable, "a published state is never written again"
        self.pages[page] = tuple(token_ids[:end])
        self.manager.publish(request_id, hashes_of(token_ids, BLOCK_SIZE), end)
        check_integrity(self.manager)

    def serve(self, request_id: str, token_ids: list[int], counts: list[int]) -> CachedPrefix:
        prefix = self.admit(request_id, token_ids, counts[0])
        start = len(self.pages[self.manager.block_ids(request_id, STATES)[-1]])
        step = 0
        while start < len(token_ids):
            step += 1
            start = self.continue_with(request_id, token_ids, start, counts[step % len(counts)])
        self.manager.free(request_id)
        return prefix

    def kept(self, token_ids: list[int]) -> list[int]:
        """Return the lengths of prefixes whose state is cached."""
        hashes = hashes_of(token_ids, BLOCK_SIZE)
        found = [self.manager.pool.lookup(STATES, block_hash) for block_hash in hashes]
        return [BLOCK_SIZE * (i + 1) for i, block in enumerate(found) if block is not None]


def test_tables_and_cached_states_of_the_design_example():
    manager = new_manager()
    token_ids = list(range(20))
    hashes = hashes_of(token_ids, BLOCK_SIZE)
    tables, found = [], []
    start = 0
    for end in (6, 8, 9, 13):
        assert manager.allocate_slots("a", end, num_computed_tokens=start)
        manager.publish("a", hashes, end)
        start = end
        tables.append(manager.block_ids("a", STATES))
        found.append([manager.pool.lookup(STATES, block_hash) is not None for block_hash in hashes])
    a, b, c = tables[0][1], tables[2][2], tables[3][3]
    assert tables == [[0, a], [0, a], [0, a, b], [0, 0, b, c]]
    assert [[i for i, there in enumerate(row) if there] for row in found] == [[], [1], [1], [1]]


def test_a_prefill_ends_its_chunks_where_earlier_requests_diverged():
    model = Recurrence(new_manager())
    shared = list(range(12))
    model.serve("a", [*shared, *range(50, 60)], [64])
    assert model.kept([*shared, *range(50, 60)]) == [20], "only the end of a's prefill is kept"
    # The host-only group knows that an earlier request had the first twelve tokens.
    prefix = model.serve("b", [*shared, *range(70, 79)], [64])
    assert prefix.num_tokens == 0 and prefix.stops.ends == (12, 20)
    assert model.kept([*shared, *range(70, 79)]) == [12, 20]
    assert model.serve("c", [*shared, *range(90, 99)], [64]).num_tokens == 12


def evict(manager: KVCacheManager, num_pages: int) -> None:
    """Evict ``num_pages`` cached pages by allocating them and all free pages."""
    blocks = manager.pool.allocate({STATES: manager.stats().free + num_pages})[STATES]
    manager.pool.release(blocks)


def test_intermediate_states_are_evicted_first_and_the_latest_serves_the_next_turn():
    model = Recurrence(new_manager())
    prompt = list(range(10))
    turn = [*prompt, *range(50, 65)]  # 25 tokens: 15 generated
    model.admit("a", prompt, 8)
    start = 8
    for length in range(10, 26):
        start = model.continue_with("a", turn[:length], start, length - start)
    model.manager.free("a")
    assert model.kept(turn) == [8, 12, 16, 20, 24]
    evict(model.manager, 2)
    assert model.kept(turn) == [8, 20, 24], "the ends of the prompt and of the request"
    assert model.serve("b", [*turn, 1, 2, 3], [64]).num_tokens == 24


def test_a_state_that_was_hit_keeps_its_priority():
    model = Recurrence(new_manager())
    shared = list(range(8))
    model.serve("a", [*shared, 99], [64])
    assert model.kept(shared) == [8]
    # b continues from it and creates its own states while generating.
    turn = [*shared, *range(50, 64)]
    model.admit("b", turn[:9], 1)
    start = 9
    for length in range(10, 23):
        start = model.continue_with("b", turn[:length], start, 1)
    model.manager.free("b")
    assert model.kept(turn) == [8, 12, 16, 20]
    evict(model.manager, 2)
    assert model.kept(turn) == [8, 20], "the shared state is kept"


def test_a_request_that_ends_with_a_block_leaves_one_state_of_high_priority():
    model = Recurrence(new_manager())
    turn = list(range(16))
    model.admit("a", turn[:3], 3)
    start = 3
    for length in range(4, 17):
        start = model.continue_with("a", turn[:length], start, 1)
    model.manager.free("a")
    assert model.kept(turn) == [4, 8, 12, 16]
    evict(model.manager, 3)
    assert model.kept(turn) == [16]
    assert len(cached_ids(model.manager.pool, STATES)) == 1


def chunks(stops: ChunkStops, total: int, budget: int, start: int = 0) -> list[int]:
    ends = []
    while start < total:
        start += stops.clip(start, min(budget, total - start), total)
        ends.append(start)
    return ends


def test_chunks_end_at_stops_and_decodes_are_not_clipped():
    # Blocks of 4, 20 tokens, a shared prefix of 12, ten tokens a step.
    assert chunks(ChunkStops(4, (12, 16)), 20, 10) == [8, 12, 16, 20]
    assert chunks(ChunkStops(4, (8,)), 11, 3) == [3, 4, 7, 8, 11], "a budget below a block"
    stops = ChunkStops(4, (8, 12))
    assert [stops.clip(start, 1, start + 1) for start in (8, 11, 12, 40)] == [1, 1, 1, 1]


@given(
    block_size=st.integers(1, 6),
    stop_blocks=st.sets(st.integers(1, 12), max_size=3),
    start=st.integers(0, 60),
    num_tokens=st.integers(1, 40),
    behind=st.integers(0, 40),
)
def test_a_chunk_is_not_empty_passes_no_stop_and_ends_with_a_block_if_possible(
    block_size, stop_blocks, start, num_tokens, behind
):
    ends = tuple(sorted(block_size * index for index in stop_blocks))
    total = start + num_tokens + behind
    count = ChunkStops(block_size, ends).clip(start, num_tokens, total)
    assert 1 <= count <= num_tokens
    end = start + count
    assert not any(start < stop < end for stop in ends)
    if end % block_size and end < total:
        # No block boundary was reachable.
        assert end == start + num_tokens and start // block_size == end // block_size
    elif end < start + num_tokens and end not in ends:
        assert end + block_size > start + num_tokens, "only the partial block is cut off"


@given(total=st.integers(1, 80), budget=st.integers(1, 30), stop_blocks=st.sets(st.integers(1, 19)))
def test_every_stop_inside_of_a_prefill_is_the_end_of_a_chunk(total, budget, stop_blocks):
    ends = tuple(sorted(4 * index for index in stop_blocks))
    reached = chunks(ChunkStops(4, ends), total, budget)
    assert reached[-1] == total
    assert {end for end in ends if end < total} <= set(reached)
