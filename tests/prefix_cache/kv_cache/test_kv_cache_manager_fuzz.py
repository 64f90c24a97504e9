"""Random event sequences against a model that keeps token lists and counts by brute force.

The model has no hashes, reference counts, generations or queues. It keeps the blocks published
for each prefix, the rows written to each block since its allocation, and the cached blocks. A
prefix is found while any block with its content is held or cached; of several blocks with the same
content that no request holds, one is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefix_cache import BlockHash, CachedPrefix, KVCacheManager, check_integrity
from tests.support.examples import examples
from tests.support.tiny_kv_cache import cached_ids, hashes_of, tiny_config

BLOCK_SIZE = 2
NUM_BLOCKS = 10
# Two tokens, one of them rare, and short prompts make shared prefixes frequent.
TOKENS = st.sampled_from([0, 0, 0, 1])
PROMPTS = st.lists(TOKENS, min_size=3, max_size=10)
EMITTED = st.sampled_from([("h",), ("h", "k")])


def row(token_ids: list[int], position: int, name: str) -> float:
    """Return a causal model's output: a distinct number for every prefix, exact in fp32."""
    number = 1
    for token in token_ids[: position + 1]:
        number = 2 * number + token
    return float(2 * number + (name == "k"))


@dataclass
class Live:
    """A running request."""

    token_ids: list[int]
    num_prompt_tokens: int
    num_published: int  # leading blocks adopted or published
    num_computed: int
    table: list[int] = field(default_factory=list)
    outdated: bool = False


class KVCacheManagerMachine(RuleBasedStateMachine):
    """Requests arrive, run in chunks, grow, fail, finish; the cache is reset sometimes."""

    @initialize(restricted=st.booleans())
    def start(self, restricted: bool) -> None:
        names = ["h"] if restricted else None
        self.manager = KVCacheManager(tiny_config(NUM_BLOCKS, BLOCK_SIZE), output_names=names)
        self.mirrored = {"h"} if restricted else {"h", "k"}
        self.known: set[str] = set()
        self.live: dict[str, Live] = {}
        self.published: dict[tuple[int, ...], list[int]] = {}  # the newest last
        self.rows: dict[int, list[set[str]]] = {}
        self.cached: set[int] = set()
        self.num_evictions = 0
        self.num_requests = 0

    # The model's answers.

    def wanted(self) -> set[str]:
        return self.mirrored if self.mirrored == {"h"} else self.known

    def expected_hit(self, token_ids: list[int]) -> list[int]:
        hit: list[int] = []
        for end in range(BLOCK_SIZE, len(token_ids), BLOCK_SIZE):
            blocks = self.published.get(tuple(token_ids[:end]))
            if not blocks or any(self.wanted() - names for names in self.rows[blocks[-1]]):
                break
            hit.append(blocks[-1])
        return hit

    def expected_in_flight(self, token_ids: list[int], num_hit_blocks: int) -> bool:
        end = (num_hit_blocks + 1) * BLOCK_SIZE
        return end < len(token_ids) and any(
            not request.outdated
            and request.num_published * BLOCK_SIZE < end <= request.num_prompt_tokens
            and request.token_ids[:end] == token_ids[:end]
            for request in self.live.values()
        )

    def held(self) -> set[int]:
        return {block_id for request in self.live.values() for block_id in request.table}

    def expect_new_blocks(self, table: list[int], num_old: int, num_free: int) -> None:
        """Check that blocks without content are allocated first."""
        new = table[num_old:]
        evicted = self.cached.intersection(new)
        assert len(evicted) == max(0, len(new) - (num_free - len(self.cached)))
        self.cached -= evicted
        self.num_evictions += len(evicted)
        for blocks in self.published.values():
            blocks[:] = [block_id for block_id in blocks if block_id not in evicted]
        for block_id in new:
            self.rows[block_id] = [set() for _ in range(BLOCK_SIZE)]

    # Events.

    @rule(token_ids=PROMPTS)
    def probe(self, token_ids: list[int]) -> None:
        self.find(token_ids)

    @rule(token_ids=PROMPTS, chunk=st.integers(1, 6))
    def arrive(self, token_ids: list[int], chunk: int) -> None:
        self.admit(token_ids, chunk)

    @precondition(lambda self: self.live)
    @rule(chunk=st.integers(1, 6), token=TOKENS, emitted=EMITTED, fails=st.booleans())
    def step(self, chunk: int, token: int, emitted: tuple[str, ...], fails: bool) -> None:
        """All requests compute a chunk in one step; a failed step publishes nothing."""
        self.compute(sorted(self.live), chunk, token, emitted, fails and chunk == 1)

    @rule(token_ids=PROMPTS, emitted=EMITTED)
    def serve(self, token_ids: list[int], emitted: tuple[str, ...]) -> None:
        """Run a request from arrival to end while other requests are between steps."""
        request_id = self.admit(token_ids, len(token_ids))
        if request_id is not None:
            self.compute([request_id], len(token_ids), 0, emitted, fails=False)
            self.free(request_id)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 6))
    def finish(self, index: int) -> None:
        """Finish, abort or preempt: each frees the request's blocks."""
        request_ids = sorted(self.live)
        self.free(request_ids[index % len(request_ids)])

    @rule(really=st.integers(0, 5))
    def reset(self, really: int) -> None:
        if really < 5:
            return
        self.manager.reset_prefix_cache()
        self.published.clear()
        self.cached.clear()
        for request in self.live.values():
            request.outdated = True

    # Parts of events.

    def find(self, token_ids: list[int]) -> CachedPrefix:
        prefix = self.manager.find_cached_prefix(self.hashes(token_ids), len(token_ids))
        hit = self.expected_hit(token_ids)
        assert [[block.block_id for block in blocks] for blocks in prefix.blocks] == [hit]
        assert prefix.num_tokens == len(hit) * BLOCK_SIZE < len(token_ids)
        assert prefix.in_flight == self.expected_in_flight(token_ids, len(hit))
        return prefix

    def admit(self, token_ids: list[int], chunk: int) -> str | None:
        prefix = self.find(token_ids)
        hit = [block.block_id for block in prefix.blocks[0]]
        num_tokens = min(prefix.num_tokens + chunk, len(token_ids))
        num_free = NUM_BLOCKS - 1 - len(self.held() | set(hit))
        fits = -(-num_tokens // BLOCK_SIZE) - len(hit) <= num_free
        self.num_requests += 1
        request_id = f"r{self.num_requests}"
        before = self.snapshot()
        assert self.manager.can_finish(num_tokens, prefix=prefix) == fits
        assert self.snapshot() == before
        assert fits == self.manager.allocate_slots(
            request_id, num_tokens, prefix=prefix, block_hashes=self.hashes(token_ids)
        )
        if not fits:
            assert self.snapshot() == before
            return None
        self.cached.difference_update(hit)
        table = self.manager.block_ids(request_id)
        assert table[: len(hit)] == hit
        self.expect_new_blocks(table, len(hit), num_free)
        self.live[request_id] = Live(
            list(token_ids), len(token_ids), len(hit), prefix.num_tokens, table
        )
        return request_id

    def compute(
        self, request_ids: list[str], chunk: int, token: int, emitted: tuple[str, ...], fails: bool
    ) -> None:
        """Run one step; a request with nothing left to compute has sampled ``token``."""
        slots: list[int] = []
        values: dict[str, list[float]] = {name: [] for name in emitted}
        ran: list[str] = []
        for request_id in request_ids:
            request = self.live[request_id]
            if request.num_computed == len(request.token_ids):
                request.token_ids.append(token)
            end = min(request.num_computed + chunk, len(request.token_ids))
            if not self.grow(request_id, end):
                continue
            ran.append(request_id)
            for position in range(request.num_computed, end):
                block_id, offset = request.table[position // BLOCK_SIZE], position % BLOCK_SIZE
                slots.append(block_id * BLOCK_SIZE + offset)
                self.rows[block_id][offset] |= set(emitted)
                for name in emitted:
                    values[name].append(row(request.token_ids, position, name))
            request.num_computed = end
        self.manager.stage_outputs.write(
            torch.tensor(slots, dtype=torch.int64),
            {name: torch.tensor(column).view(-1, 1) for name, column in values.items()},
        )
        if slots:
            self.known |= set(emitted) & self.mirrored
        for request_id in ran:
            self.check_outputs(self.live[request_id], request_id)
            if fails:
                self.free(request_id)
            else:
                self.publish(request_id)

    def grow(self, request_id: str, num_tokens: int) -> bool:
        request = self.live[request_id]
        num_free = NUM_BLOCKS - 1 - len(self.held())
        fits = -(-num_tokens // BLOCK_SIZE) - len(request.table) <= num_free
        before = self.snapshot()
        assert self.manager.allocate_slots(request_id, num_tokens) == fits
        if not fits:
            assert self.snapshot() == before
            return False
        num_old = len(request.table)
        table = self.manager.block_ids(request_id)
        assert table[:num_old] == request.table
        request.table = table
        self.expect_new_blocks(table, num_old, num_free)
        return True

    def publish(self, request_id: str) -> None:
        request = self.live[request_id]
        self.manager.publish(request_id, self.hashes(request.token_ids), request.num_computed)
        if request.outdated:
            return
        for index in range(request.num_published, request.num_computed // BLOCK_SIZE):
            content = tuple(request.token_ids[: (index + 1) * BLOCK_SIZE])
            blocks = self.published.setdefault(content, [])
            blocks.append(request.table[index])
            for older in self.cached.intersection(blocks):
                self.cached.remove(older)
                blocks.remove(older)
            request.num_published = index + 1

    def free(self, request_id: str) -> None:
        table = self.live.pop(request_id).table
        self.manager.free(request_id)
        held = self.held()
        for block_id in reversed(table):
            blocks = next((b for b in self.published.values() if block_id in b), None)
            if block_id in held or blocks is None:
                continue
            newest = blocks[-1]
            if block_id != newest:
                blocks.remove(block_id)
                if newest in held:
                    continue
            self.cached.add(newest)

    def check_outputs(self, request: Live, request_id: str) -> None:
        """Check every row computed so far, cached or not; a tensor lacking a row is absent."""
        positions = range(request.num_computed)
        complete = {
            name
            for name in self.mirrored
            if all(
                name in self.rows[request.table[p // BLOCK_SIZE]][p % BLOCK_SIZE] for p in positions
            )
        }
        outputs = self.manager.gather_outputs(request_id, request.num_computed)
        assert outputs.keys() == complete
        for name, rows in outputs.items():
            assert rows[:, 0].tolist() == [row(request.token_ids, p, name) for p in positions]

    def hashes(self, token_ids: list[int]) -> list[BlockHash]:
        return hashes_of(token_ids, BLOCK_SIZE)

    def snapshot(self) -> tuple[object, ...]:
        """Return all state that a refused call must not change."""
        pool = self.manager.pool
        pages = pool.arenas[0].pages
        return (
            self.manager.stats(),
            self.manager.request_ids,
            dict(self.manager.pending.counts),
            [(b.block_id, b.ref_cnt, b.block_hash, b.key) for p in pages for b in p.blocks],
            [page.page_id for page in pool.arenas[0].free_pages],
            cached_ids(pool),
            pool.generations(0).tolist(),
            {request_id: self.manager.block_ids(request_id) for request_id in self.live},
        )

    @invariant()
    def everything_adds_up(self) -> None:
        check_integrity(self.manager)
        stats = self.manager.stats()
        assert stats.held == len(self.held())
        assert sorted(cached_ids(self.manager.pool)) == sorted(self.cached)
        assert stats.evictions == self.num_evictions
        pool = self.manager.pool
        assert {block.block_id for block in pool.hash_tables[0].values()} == {
            blocks[-1] for blocks in self.published.values() if blocks
        }
        assert {block.block_id for older in pool.older.values() for block in older} == {
            block_id for blocks in self.published.values() for block_id in blocks[:-1]
        }

    def teardown(self) -> None:
        for request_id in list(getattr(self, "live", ())):
            self.free(request_id)
        if hasattr(self, "manager"):
            assert self.manager.stats().held == 0 and not self.manager.pending.counts


KVCacheManagerMachine.TestCase.settings = settings(
    max_examples=examples(100), stateful_step_count=40
)
TestKVCacheManager = KVCacheManagerMachine.TestCase
