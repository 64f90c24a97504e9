"""Random event sequences over groups of every kind: a hit equals what a fresh request computes.

The model has its own memory, in which each slot holds the tokens that determine its content.
A large page loses its content when another group writes to it. A request must see only its own
tokens there, and must find the longest prefix that all groups can serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefix_cache import (
    BlockHash,
    CachedPrefix,
    EncoderBlocks,
    KVCacheManager,
    check_integrity,
    whole_input_hash,
)
from tests.support.examples import examples
from tests.support.tiny_kv_cache import GROUP_MIXES, hashes_of, mixed_config

BLOCK_SIZE = 2
PROMPTS = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=2, max_size=14)
ENCODERS = st.tuples(st.integers(0, 1), st.integers(1, 5))
CHUNKS = st.integers(1, 7)

Content = tuple[int, ...]


def first_visible(kind: str, position: int, reach: int) -> int:
    """Return the first token that the token at ``position`` sees."""
    match kind:
        case "sliding":
            return max(0, position - reach + 1)
        case "mamba":
            return max(0, position - 1)
    return 0


@dataclass
class Memory:
    """Memory contents: ``(group, block, offset)`` to the tokens that they were computed from."""

    pages_per_large_page: dict[int, int]
    places: dict[tuple[int, int, int], Content] = field(default_factory=dict)
    owners: dict[int, int] = field(default_factory=dict)

    def write(self, group: int, block: int, offset: int, content: Content) -> None:
        large = block // self.pages_per_large_page[group]
        assert large > 0, "the null page is never written"
        if self.owners.get(large) != group:
            for place in [
                p for p in self.places if p[1] // self.pages_per_large_page[p[0]] == large
            ]:
                del self.places[place]
            self.owners[large] = group
        self.places[group, block, offset] = content

    def read(self, group: int, block: int, offset: int) -> Content | None:
        return self.places.get((group, block, offset))


@dataclass
class Live:
    """A running request."""

    token_ids: list[int]
    num_computed: int
    encoder: EncoderBlocks | None
    encoder_content: Content


class GroupMixMachine(RuleBasedStateMachine):
    """Requests arrive, run in chunks, grow, fail, are preempted, finish; the cache is reset."""

    mix = "all"
    num_large_pages = 8

    @initialize(reach=st.integers(2, 6), num_host_blocks=st.integers(9, 20))
    def start(self, reach: int, num_host_blocks: int) -> None:
        layers = GROUP_MIXES[self.mix]
        config = mixed_config(
            layers, self.num_large_pages, BLOCK_SIZE, reach=reach, num_host_blocks=num_host_blocks
        )
        self.kinds = [kind.strip() for kind in layers]
        self.reach = reach
        self.manager = KVCacheManager(config, max_num_batched_tokens=7)
        self.memory = Memory({g: config.pages_per_large_page(g) for g in range(len(layers))})
        self.live: dict[str, Live] = {}
        self.num_requests = 0
        self.numbers: dict[Content, int] = {}  # the content of a token's row

    # Events.

    @rule(token_ids=PROMPTS, chunk=CHUNKS, encoder=ENCODERS)
    def arrive(self, token_ids: list[int], chunk: int, encoder: tuple[int, int]) -> None:
        self.admit(token_ids, chunk, encoder)

    @rule(token_ids=PROMPTS, chunk=CHUNKS, encoder=ENCODERS)
    def serve(self, token_ids: list[int], chunk: int, encoder: tuple[int, int]) -> None:
        """Run a request from arrival to end while other requests are between steps."""
        request_id = self.admit(token_ids, chunk, encoder)
        while request_id in self.live:
            if self.live[request_id].num_computed == len(token_ids):
                self.free(request_id)
            else:
                self.compute(request_id, chunk)

    @precondition(lambda self: self.live)
    @rule(chunk=CHUNKS, token=st.integers(0, 1), fails=st.integers(0, 7))
    def step(self, chunk: int, token: int, fails: int) -> None:
        """All requests compute a chunk; some steps fail and publish nothing."""
        for request_id in sorted(self.live):
            request = self.live[request_id]
            if request.num_computed == len(request.token_ids):
                request.token_ids.append(token)
            self.compute(request_id, chunk, fails=fails == 7)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 6))
    def finish(self, index: int) -> None:
        """Finish, abort or preempt: each frees the request's blocks."""
        request_ids = sorted(self.live)
        self.free(request_ids[index % len(request_ids)])

    @rule(really=st.integers(0, 9))
    def reset(self, really: int) -> None:
        if really == 9:
            self.manager.reset_prefix_cache()
            assert not any(self.manager.pool.hash_tables.values())

    # Parts of events.

    def hashes(self, token_ids: Sequence[int], encoder_content: Content) -> list[BlockHash]:
        """Return hashes salted with the encoder's content, on which every token depends."""
        return hashes_of(token_ids, BLOCK_SIZE, salt=str(encoder_content))

    def longest_hit(self, hashes: list[BlockHash], num_tokens: int) -> int:
        """Return the longest prefix of which all groups have the blocks seen by the next token."""

        def serves(group: int, kind: str, length: int) -> bool:
            first = first_visible(kind, length, self.reach) if length else 0
            return all(
                self.manager.pool.lookup(group, hashes[position // BLOCK_SIZE]) is not None
                for position in range(first, length)
            )

        groups = [(g, kind) for g, kind in enumerate(self.kinds) if kind != "cross"]
        return max(
            length
            for length in range(0, num_tokens, BLOCK_SIZE)
            if all(serves(group, kind, length) for group, kind in groups)
        )

    def admit(self, token_ids: list[int], chunk: int, encoder: tuple[int, int]) -> str | None:
        blocks: EncoderBlocks | None = None
        content: Content = ()
        if "cross" in self.kinds:
            blocks = EncoderBlocks.of(whole_input_hash(encoder), encoder[1], BLOCK_SIZE)
            content = encoder
        hashes = self.hashes(token_ids, content)
        prefix = self.manager.find_cached_prefix(hashes, len(token_ids), blocks)
        start = prefix.num_tokens
        assert start == self.longest_hit(hashes, len(token_ids))
        count = min(chunk, len(token_ids) - start)
        if prefix.stops is not None:
            count = prefix.stops.clip(start, count, len(token_ids))
        self.num_requests += 1
        request_id = f"r{self.num_requests}"
        if not self.manager.allocate_slots(
            request_id,
            start + count,
            num_computed_tokens=start,
            encoder=blocks,
            prefix=prefix,
            block_hashes=hashes,
        ):
            assert request_id not in self.manager.request_ids
            return None
        self.live[request_id] = Live(list(token_ids), start, blocks, content)
        self.run(request_id, start + count, prefix)
        return request_id

    def compute(self, request_id: str, chunk: int, *, fails: bool = False) -> None:
        request = self.live[request_id]
        start, total = request.num_computed, len(request.token_ids)
        count = self.manager.clip_chunk(request_id, start, min(chunk, total - start), total)
        if not self.manager.allocate_slots(
            request_id, start + count, num_computed_tokens=start, encoder=request.encoder
        ):
            self.free(request_id)  # preempted
            return
        self.run(request_id, start + count, None, fails=fails)

    def run(
        self, request_id: str, end: int, prefix: CachedPrefix | None, *, fails: bool = False
    ) -> None:
        """Run the model's part of a step, then the engine's."""
        request = self.live[request_id]
        start, tokens = request.num_computed, tuple(request.token_ids)
        own = request.encoder_content
        runs_encoder = prefix is not None and not prefix.encoder_cached
        for group, kind in enumerate(self.kinds):
            table = self.manager.block_ids(request_id, group)
            if kind == "mamba":
                self.run_state(group, table, own, tokens, start, end)
            elif kind == "cross":
                self.run_encoder(group, table, request, runs=runs_encoder)
            elif kind != "host":
                for position in range(start, end):
                    block, offset = divmod(position, BLOCK_SIZE)
                    self.memory.write(group, table[block], offset, own + tokens[: position + 1])
                for position in range(start, end):
                    for seen in range(first_visible(kind, position, self.reach), position + 1):
                        block, offset = divmod(seen, BLOCK_SIZE)
                        there = self.memory.read(group, table[block], offset)
                        assert there == own + tokens[: seen + 1]
        self.write_rows(request_id, own, tokens, start, end)
        request.num_computed = end
        if fails:
            self.free(request_id)
            return
        self.manager.publish(request_id, self.hashes(tokens, own), end)
        if request.encoder is not None and runs_encoder:
            self.manager.publish_encoder(request_id, request.encoder)

    def run_state(
        self, group: int, table: list[int], own: Content, tokens: Content, start: int, end: int
    ) -> None:
        """Read one page and write one; a cached page is never written again."""
        state: Content | None = own
        if start:
            state = self.memory.read(group, table[(start - 1) // BLOCK_SIZE], 0)
        assert state == own + tokens[:start]
        page = table[(end - 1) // BLOCK_SIZE]
        published = (b.block_id for b in self.manager.pool.hash_tables[group].values())
        assert page not in published
        self.memory.write(group, page, 0, own + tokens[:end])

    def run_encoder(self, group: int, table: list[int], request: Live, *, runs: bool) -> None:
        assert request.encoder is not None
        for position in range(request.encoder.num_tokens):
            block, offset = divmod(position, BLOCK_SIZE)
            content = (*request.encoder_content, position)
            if runs:
                self.memory.write(group, table[block], offset, content)
            assert self.memory.read(group, table[block], offset) == content

    def write_rows(
        self, request_id: str, own: Content, tokens: Content, start: int, end: int
    ) -> None:
        """Write rows of the new tokens, then check that all rows belong to the request."""
        table = self.manager.block_ids(request_id, self.manager.mirrored_group_id)
        contents = [own + tokens[: position + 1] for position in range(end)]
        rows = [self.numbers.setdefault(content, len(self.numbers)) for content in contents]
        slots = [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, end)]
        self.manager.stage_outputs.write(torch.tensor(slots), {"h": torch.tensor(rows[start:])})
        assert self.manager.gather_outputs(request_id, end)["h"].tolist() == rows

    def free(self, request_id: str) -> None:
        del self.live[request_id]
        self.manager.free(request_id)

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "manager"):
            check_integrity(self.manager)

    @invariant()
    def what_a_request_has_published_and_holds_can_be_found(self) -> None:
        """Even if other requests computed the same content and freed it."""
        for request_id, request in getattr(self, "live", {}).items():
            if self.manager.resets_before(request_id) < self.manager.num_resets:
                continue
            hashes = self.hashes(request.token_ids, request.encoder_content)
            for group, kind in enumerate(self.kinds):
                if kind in ("cross", "mamba"):  # not every block of these is published
                    continue
                table = self.manager.block_ids(request_id, group)
                for index in range(request.num_computed // BLOCK_SIZE):
                    assert not table[index] or self.manager.pool.lookup(group, hashes[index])

    def teardown(self) -> None:
        """After all requests ended, all large pages are free or cached and usable by any group."""
        if not hasattr(self, "manager"):
            return
        for request_id in list(self.live):
            self.free(request_id)
        stats = self.manager.stats()
        assert stats.held == 0 and stats.free + stats.cached == self.num_large_pages - 1
        assert not self.manager.pending.counts
        pool = self.manager.pool
        for group in range(len(self.kinds)):
            blocks = pool.allocate({group: pool.num_free(group)})[group]
            pool.release(blocks)
        assert self.manager.stats().free == self.num_large_pages - 1


def _machine(mix_name: str, pages: int) -> Any:
    attributes = {"mix": mix_name, "num_large_pages": pages}
    machine: Any = type(f"Mix_{mix_name}", (GroupMixMachine,), attributes)
    machine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=30)
    return machine.TestCase


TestThreeSizesOfFullAttention = _machine("three_full", 4)
TestSlidingBesideFull = _machine("gemma", 6)
TestSlidingOnly = _machine("ministral", 9)
TestStatesBesideFull = _machine("jamba", 7)
TestStatesOnly = _machine("mamba", 8)
TestCrossBesideFull = _machine("mllama", 6)
TestEveryKind = _machine("all", 7)
