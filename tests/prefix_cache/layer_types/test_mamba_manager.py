"""States: which pages a step reads and writes, which states stay findable, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from prefix_cache import BlockHash, CachedPrefix, KVCacheManager, check_integrity
from tests.support.tiny_kv_cache import cached_ids, hashes_of, mixed_config

BLOCK_SIZE = 4
STATES = 0  # the group's id in the configurations here


def new_manager(num_pages: int = 40, budget: int = 64) -> KVCacheManager:
    config = mixed_config({"mamba": 1, "host": 1}, num_pages, BLOCK_SIZE)
    return KVCacheManager(config, max_num_batched_tokens=budget)


@dataclass
class Recurrence:
    """A recurrent model: a page's content is the tuple of all tokens that the state has seen."""

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

    def go_on(self, request_id: str, token_ids: list[int], start: int, count: int) -> int:
        count = min(count, len(token_ids) - start)
        count = self.manager.clip_chunk(request_id, start, count, len(token_ids))
        end = start + count
        assert self.manager.allocate_slots(request_id, end, num_computed_tokens=start)
        self.run(request_id, token_ids, start, end)
        return end

    def run(self, request_id: str, token_ids: list[int], start: int, end: int) -> None:
        """Read one page, write one page, then publish: as engine.attention.layer says."""
        table = self.manager.block_ids(request_id, STATES)
        state: tuple[int, ...] = ()
        if start:
            state = self.pages[table[(start - 1) // BLOCK_SIZE]]
            assert table[(start - 1) // BLOCK_SIZE] != 0
        assert state == tuple(token_ids[:start]), "the state that goes on is the request's"
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
            start = self.go_on(request_id, token_ids, start, counts[step % len(counts)])
        self.manager.free(request_id)
        return prefix

    def kept(self, token_ids: list[int]) -> list[int]:
        """Lengths of the prefixes whose state can be found."""
        hashes = hashes_of(token_ids, BLOCK_SIZE)
        found = [self.manager.pool.lookup(STATES, block_hash) for block_hash in hashes]
        return [BLOCK_SIZE * (i + 1) for i, block in enumerate(found) if block is not None]


def digest_of(token_ids: list[int]) -> BlockHash:
    return hashes_of(token_ids, BLOCK_SIZE)[-1]


@given(
    requests=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 30), st.lists(st.integers(1, 13), min_size=1)),
        min_size=1,
        max_size=6,
    ),
    num_pages=st.integers(4, 12),
)
def test_a_request_goes_on_from_its_own_state_and_no_published_one_changes(requests, num_pages):
    model = Recurrence(new_manager(num_pages))
    for index, (family, length, counts) in enumerate(requests):
        # Members of a family share a prefix of 9 tokens.
        own = [100 * index + 50 + i for i in range(max(0, length - 9))]
        token_ids = [100 * family + i for i in range(min(9, length))] + own
        model.serve(f"r{index}", token_ids, counts)
    for block_hash, block in model.manager.pool.hash_tables[STATES].items():
        assert digest_of(list(model.pages[block.block_id])) == block_hash
    assert model.manager.stats().held == 0


def test_the_example():
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


def test_a_prefill_ends_its_chunks_where_others_parted():
    model = Recurrence(new_manager())
    shared = list(range(12))
    model.serve("a", [*shared, *range(50, 60)], [64])
    assert model.kept([*shared, *range(50, 60)]) == [20], "the end of a's prefill"
    # The host-only group tells that somebody had the first twelve tokens before.
    prefix = model.serve("b", [*shared, *range(70, 79)], [64])
    assert prefix.num_tokens == 0 and prefix.stops.ends == (12, 20)
    assert model.kept([*shared, *range(70, 79)]) == [12, 20]
    assert model.serve("c", [*shared, *range(90, 99)], [64]).num_tokens == 12


def evict(manager: KVCacheManager, num_pages: int) -> None:
    """Take all free pages and so many with content, then give them back."""
    blocks = manager.pool.allocate({STATES: manager.stats().free + num_pages})[STATES]
    manager.pool.release(blocks)


def test_intermediate_states_go_first_and_the_latest_serves_the_next_turn():
    model = Recurrence(new_manager())
    prompt = list(range(10))
    turn = [*prompt, *range(50, 65)]  # 25 tokens: 15 generated
    model.admit("a", prompt, 8)
    start = 8
    for length in range(10, 26):
        start = model.go_on("a", turn[:length], start, length - start)
    model.manager.free("a")
    assert model.kept(turn) == [8, 12, 16, 20, 24]
    evict(model.manager, 2)
    assert model.kept(turn) == [8, 20, 24], "the end of the prompt, and of the request"
    assert model.serve("b", [*turn, 1, 2, 3], [64]).num_tokens == 24


def test_a_state_that_was_hit_is_as_good_as_new():
    model = Recurrence(new_manager())
    shared = list(range(8))
    model.serve("a", [*shared, 99], [64])
    assert model.kept(shared) == [8]
    # b goes on from it, and makes states of its own as it generates.
    turn = [*shared, *range(50, 64)]
    model.admit("b", turn[:9], 1)
    start = 9
    for length in range(10, 23):
        start = model.go_on("b", turn[:length], start, 1)
    model.manager.free("b")
    assert model.kept(turn) == [8, 12, 16, 20]
    evict(model.manager, 2)
    assert model.kept(turn) == [8, 20], "others may share it again"


def test_a_request_that_ends_with_a_block_leaves_one_state_of_high_priority():
    model = Recurrence(new_manager())
    turn = list(range(16))
    model.admit("a", turn[:3], 3)
    start = 3
    for length in range(4, 17):
        start = model.go_on("a", turn[:length], start, 1)
    model.manager.free("a")
    assert model.kept(turn) == [4, 8, 12, 16]
    evict(model.manager, 3)
    assert model.kept(turn) == [16]
    assert len(cached_ids(model.manager.pool, STATES)) == 1
