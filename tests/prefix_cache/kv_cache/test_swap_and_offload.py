"""Blocks moved off the device return with the same pages and rows, or are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prefix_cache import (
    ENCODER_HIDDEN_STATES,
    CachedPrefix,
    DiskTier,
    EncoderBlocks,
    HostTier,
    KVCacheConfig,
    KVCacheManager,
    OffloadedBlocks,
    PageCopy,
    PagedMemory,
    SwapSpace,
    check_integrity,
    check_pool_integrity,
    content_hash,
    whole_input_hash,
)
from tests.support.examples import examples
from tests.support.tiny_kv_cache import GROUP_MIXES, hashes_of, mixed_config

BLOCK_SIZE = 4
SELF, CROSS = 0, 1


def bart_like(num_pages: int = 20) -> KVCacheConfig:
    """Return a config in which a large page is one block, so that blocks can be counted."""
    return mixed_config({"full": 2, "cross": 2}, num_pages, BLOCK_SIZE)


def encoder_of(num_tokens: int, content: int = 0) -> EncoderBlocks:
    return EncoderBlocks.of(content_hash(torch.tensor([content])), num_tokens, BLOCK_SIZE)


class Pools:
    """A device pool and a host pool."""

    def __init__(self, config: KVCacheConfig, num_host_pages: int = 12, **options: object) -> None:
        self.manager = KVCacheManager(config, **options)  # type: ignore[arg-type]
        self.swap = SwapSpace(self.manager, num_host_pages)
        self.device = PagedMemory(config)
        self.host = PagedMemory(self.swap.config)

    def free_all(self) -> None:
        """Free all requests in both pools and reset the cache."""
        for request_id in self.manager.request_ids:
            self.manager.free(request_id)
        for request_id in self.swap.request_ids:
            self.swap.free(request_id)
        self.manager.reset_prefix_cache()

    @property
    def free(self) -> tuple[int, int]:
        """Large pages on the device and on the host that no request holds."""
        pools = (self.manager.pool, self.swap.pool)
        device, host = (pool.arenas[0].num_available for pool in pools)
        return device, host

    def swap_out(self, request_id: str, num_computed_tokens: int) -> bool:
        copies = self.swap.swap_out(request_id, num_computed_tokens)
        self.move(copies or (), self.device, self.host)
        return copies is not None

    def swap_in(self, request_id: str, *, headroom: int = 0) -> bool:
        copies = self.swap.swap_in(request_id, headroom=headroom)
        self.move(copies or (), self.host, self.device)
        return copies is not None

    @staticmethod
    def move(copies: Sequence[PageCopy], source: PagedMemory, target: PagedMemory) -> None:
        for copy in copies:
            source.copy_pages(copy, target)

    def page(self, memory: PagedMemory, group_id: int, block_id: int) -> Tensor:
        pages = memory.buffer.view(-1, memory.config.groups[group_id].page_bytes)
        return pages[block_id]

    def check(self) -> None:
        check_integrity(self.manager)
        check_pool_integrity(self.swap.pool, self.swap.tables())


def test_swapping_out_keeps_shared_cross_attention_blocks() -> None:
    """On the host a request has its own copy; on the device the other request still uses them."""
    pools = Pools(bart_like())
    encoder = encoder_of(8)
    assert pools.manager.allocate_slots("a", 4, encoder=encoder)
    pools.manager.publish_encoder("a", encoder)
    prefix = pools.manager.find_cached_prefix([], 4, encoder)
    assert prefix.encoder_cached
    before = pools.free
    assert pools.manager.allocate_slots("b", 4, encoder=encoder, prefix=prefix)
    assert pools.free == (before[0] - 1, before[1]), "b allocates only a block for its own tokens"
    table = pools.manager.block_ids("a", CROSS)
    assert pools.swap_out("b", 4)
    assert pools.free == (before[0], before[1] - 3)
    assert pools.manager.block_ids("a", CROSS) == table
    assert pools.swap_in("b")
    assert pools.free == (before[0] - 3, before[1])
    assert not set(pools.manager.block_ids("b", CROSS)) & set(table)
    pools.check()


def test_swapping_restores_output_rows_of_both_sequences() -> None:
    names = {"hidden_states", ENCODER_HIDDEN_STATES}
    pools = Pools(bart_like(), output_names=names)
    manager = pools.manager
    assert manager.encoder_outputs is not None
    assert manager.allocate_slots("a", 10, encoder=encoder_of(7))
    rows, encoder_rows = torch.randn(10, 3), torch.randn(7, 5)

    def slots(group_id: int, count: int) -> Tensor:
        blocks = torch.tensor(manager.block_ids("a", group_id))
        return (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:count]

    manager.stage_outputs.write(slots(SELF, 10), {"hidden_states": rows})
    manager.encoder_outputs.write(slots(CROSS, 7), {ENCODER_HIDDEN_STATES: encoder_rows})
    # The last token was not computed yet, so its row is not kept.
    assert pools.swap_out("a", 9)
    assert manager.allocate_slots("b", 20, encoder=encoder_of(16, 1))
    assert pools.swap_in("a")
    assert torch.equal(manager.gather_outputs("a", 9)["hidden_states"], rows[:9])
    assert manager.gather_outputs("a", 10) == {}
    gathered = manager.outputs.gather_encoder("a", 7)[ENCODER_HIDDEN_STATES]
    assert torch.equal(gathered, encoder_rows)


def test_a_request_swapped_in_publishes_its_blocks() -> None:
    """What it has not computed yet is in flight again."""
    pools = Pools(bart_like())
    hashes = hashes_of(range(12), BLOCK_SIZE)
    encoder = encoder_of(3)
    assert pools.manager.allocate_slots("a", 12, encoder=encoder, block_hashes=hashes)
    pools.manager.publish_encoder("a", encoder)
    pools.manager.publish("a", hashes, 4)
    assert pools.swap_out("a", 5)
    prefix = pools.manager.find_cached_prefix(hashes, 12, encoder)
    assert (prefix.num_tokens, prefix.in_flight) == (4, False)
    assert pools.swap.swap_in("a", hashes) is not None
    prefix = pools.manager.find_cached_prefix(hashes, 12, encoder)
    assert (prefix.num_tokens, prefix.in_flight) == (4, True)
    pools.manager.publish("a", hashes, 12)
    prefix = pools.manager.find_cached_prefix(hashes, 13, encoder)
    assert (prefix.num_tokens, prefix.in_flight) == (12, False)
    pools.check()


def test_a_swap_without_room_changes_nothing() -> None:
    pools = Pools(bart_like(num_pages=8), num_host_pages=5)
    assert pools.manager.allocate_slots("a", 8, encoder=encoder_of(5))
    assert pools.manager.allocate_slots("b", 8, encoder=encoder_of(2, 1))
    before = pools.free
    assert pools.swap_out("a", 8)
    assert not pools.swap_out("b", 8), "three blocks exceed the host's capacity"
    assert pools.free == (before[0] + 4, before[1] - 4)
    assert pools.manager.request_ids == {"b"}
    assert not pools.swap_in("a", headroom=1)
    assert pools.free == (before[0] + 4, before[1] - 4)
    assert pools.swap_in("a")
    assert pools.free == before
    pools.check()


@pytest.mark.parametrize("method", ["free", "swap_in"])
def test_only_swapped_out_requests_can_be_swapped_in_or_freed(method: str) -> None:
    pools = Pools(bart_like())
    assert pools.manager.allocate_slots("a", 4)
    act: Callable[[str], object] = getattr(pools.swap, method)
    with pytest.raises(ValueError, match="'a' is not swapped out"):
        act("a")
    with pytest.raises(ValueError, match="'b' holds no blocks"):
        pools.swap.swap_out("b", 0)


class Traffic:
    """Requests that arrive, grow, swap and finish; each marks its pages and checks its marks."""

    def __init__(self, mix: str) -> None:
        config = mixed_config(GROUP_MIXES[mix], 12, BLOCK_SIZE, num_host_blocks=60)
        self.pools = Pools(config, num_host_pages=8)
        self.manager, self.swap = self.pools.manager, self.pools.swap
        self.lengths: dict[str, int] = {}
        self.marks: dict[tuple[str, int, int], int] = {}
        self.new_marks = count(1)

    def places(self, request_id: str) -> Iterator[tuple[tuple[str, int, int], Tensor]]:
        """Yield the key and page of every block that a request holds on the device."""
        for group_id, group in enumerate(self.swap.config.groups):
            if group.on_device:
                for index, block_id in enumerate(self.manager.block_ids(request_id, group_id)):
                    if block_id:
                        page = self.pools.page(self.pools.device, group_id, block_id)
                        yield (request_id, group_id, index), page.view(torch.int32)

    def num_held(self, request_id: str) -> int:
        tables = [m.table(request_id) for m in self.manager.coordinator.managers]
        return sum(block.large_page is not None for table in tables for block in table)

    def num_on_host(self) -> int:
        return sum(len(table) for table in self.swap.tables())

    def grow(self, request_id: str, end: int, encoder: EncoderBlocks) -> None:
        start = self.lengths.get(request_id, 0)
        if self.manager.allocate_slots(request_id, end, num_computed_tokens=start, encoder=encoder):
            self.lengths[request_id] = end
            for place, page in self.places(request_id):
                if place not in self.marks:
                    self.marks[place] = next(self.new_marks)
                    page.fill_(self.marks[place])

    def swap_out(self, request_id: str) -> None:
        num_held, on_host = self.num_held(request_id), self.num_on_host()
        moved = self.pools.swap_out(request_id, self.lengths[request_id])
        assert moved == (request_id not in self.manager.request_ids)
        assert self.num_on_host() == on_host + (num_held if moved else 0)

    def swap_in(self, request_id: str) -> None:
        on_host = self.num_on_host()
        moved = self.pools.swap_in(request_id)
        assert moved == (request_id in self.manager.request_ids)
        num_held = self.num_held(request_id) if moved else 0
        assert self.num_on_host() == on_host - num_held

    def free(self, request_id: str) -> None:
        (self.manager if request_id in self.manager.request_ids else self.swap).free(request_id)
        del self.lengths[request_id]
        self.marks = {place: m for place, m in self.marks.items() if place[0] != request_id}

    def check(self) -> None:
        self.pools.check()
        for request_id in self.manager.request_ids:
            for place, page in self.places(request_id):
                assert bool((page == self.marks[place]).all()), f"the page of {place} has changed"


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["grow", "grow", "move", "move", "free", "free"]),
        st.integers(0, 5),
        st.integers(1, 6),
    ),
    min_size=5,
    max_size=40,
)


@pytest.mark.parametrize("mix", GROUP_MIXES)
@settings(max_examples=examples(60))
@given(events=EVENTS)
def test_any_order_of_events_conserves_blocks_and_pages(
    mix: str, events: list[tuple[str, int, int]]
) -> None:
    traffic = Traffic(mix)
    for event, number, amount in events:
        request_id = f"r{number}"
        lives = request_id in traffic.manager.request_ids
        swapped = request_id in traffic.swap.request_ids
        if event == "grow" and not swapped:
            end = traffic.lengths.get(request_id, 0) + amount
            traffic.grow(request_id, end, encoder_of(2 * number + 1))
        elif event == "move" and lives:
            traffic.swap_out(request_id)
        elif event == "move" and swapped:
            traffic.swap_in(request_id)
        elif event == "free" and (lives or swapped):
            traffic.free(request_id)
        traffic.check()
    traffic.pools.free_all()
    traffic.pools.check()
    assert traffic.pools.free == (11, 7)


NUM_TOKENS = 33
IDS = tuple(range(NUM_TOKENS))
ENCODER = EncoderBlocks.of(whole_input_hash(range(6)), 6, BLOCK_SIZE)
Tier = Literal["host", "disk"]


class Cache:
    """A manager of a group mix with its memory, its tiers and the expected contents."""

    def __init__(self, mix: str, tier: Tier, folder: Path, num_large_pages: int = 80) -> None:
        layers = GROUP_MIXES[mix]
        config = mixed_config(layers, num_large_pages, BLOCK_SIZE, num_host_blocks=80)
        self.manager = KVCacheManager(config, output_names=["rows"], max_num_batched_tokens=64)
        self.encoder = ENCODER if self.manager.coordinator.encoder_managers else None
        self.memory = PagedMemory(config)
        self.folder = folder
        self.offloaded = OffloadedBlocks(
            self.manager,
            self.memory,
            HostTier(2**20) if tier == "host" else None,
            DiskTier(folder, 2**20, b"f" * 32) if tier == "disk" else None,
        )
        self.hashes = hashes_of(IDS, BLOCK_SIZE)
        # The store of rows is created by the first write.
        self.manager.stage_outputs.write(torch.zeros(1, dtype=torch.int64), {"rows": self.rows(1)})

    @staticmethod
    def rows(num_tokens: int) -> torch.Tensor:
        return torch.arange(num_tokens * 3, dtype=torch.bfloat16).reshape(num_tokens, 3)

    def content(self) -> dict[tuple[int, bytes], bytes]:
        """Return the page contents of all cached blocks."""
        pool = self.manager.pool
        found: dict[tuple[int, bytes], bytes] = {}
        for group_id, table in pool.hash_tables.items():
            if self.manager.config.groups[group_id].on_device:
                for block_hash, block in table.items():
                    page = self.memory.read_pages(group_id, [block.block_id])
                    found[group_id, block_hash] = page[0].numpy().tobytes()
        return found

    def compute(self) -> dict[tuple[int, bytes], bytes]:
        """Run a request in chunks and store its blocks."""
        manager, num_computed = self.manager, 0
        prefix: CachedPrefix | None = manager.find_cached_prefix(
            self.hashes, NUM_TOKENS, self.encoder
        )
        content: dict[tuple[int, bytes], bytes] = {}
        while num_computed < NUM_TOKENS:
            end = min(num_computed + 16, NUM_TOKENS)
            assert manager.allocate_slots(
                "r",
                end,
                num_computed_tokens=num_computed,
                encoder=self.encoder,
                prefix=prefix,
                block_hashes=self.hashes,
            )
            prefix = None
            for group in manager.coordinator.managers:
                config = manager.config.groups[group.group_id]
                if not config.on_device:
                    continue
                for block in group.table("r"):
                    if block.large_page is not None and block.block_hash is None:
                        page = torch.randint(256, (config.content_bytes,), dtype=torch.uint8)
                        self.memory.write_page(group.group_id, block.block_id, page)
            ids = torch.tensor(manager.block_ids("r", manager.mirrored_group_id))
            slots = manager.stage_outputs.slots(ids)[num_computed:end]
            manager.stage_outputs.write(slots, {"rows": self.rows(NUM_TOKENS)[num_computed:end]})
            manager.publish("r", self.hashes, end)
            self.offloaded.store("r", num_computed // BLOCK_SIZE)
            if self.encoder is not None and not num_computed:
                manager.publish_encoder("r", self.encoder)
                self.offloaded.store_encoder("r", self.encoder.num_tokens)
            content |= self.content()
            num_computed = end
        manager.free("r")
        return content

    def fetch(self) -> tuple[bool, int]:
        """Return whether blocks were fetched, and the number of tokens found afterwards."""
        before = self.manager.find_cached_prefix(self.hashes, NUM_TOKENS, self.encoder)
        fetched = self.offloaded.fetch(before, self.hashes, NUM_TOKENS, self.encoder)
        check_integrity(self.manager)
        after = self.manager.find_cached_prefix(self.hashes, NUM_TOKENS, self.encoder)
        assert after.encoder_cached or self.encoder is not None
        assert fetched or after == before
        return fetched, after.num_tokens

    def check_rows(self, num_tokens: int) -> None:
        prefix = self.manager.find_cached_prefix(self.hashes, NUM_TOKENS, self.encoder)
        ids = [block.block_id for block in prefix.blocks[self.manager.mirrored_group_id]]
        rows = self.manager.stage_outputs.gather(ids, num_tokens)["rows"]
        assert torch.equal(rows, self.rows(NUM_TOKENS)[:num_tokens])


@pytest.mark.parametrize("mix", GROUP_MIXES)
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_offloaded_blocks_are_restored_unchanged(mix: str, tier: Tier, tmp_path: Path) -> None:
    cache = Cache(mix, tier, tmp_path)
    content = cache.compute()
    cache.manager.reset_prefix_cache()
    cache.memory.buffer.fill_(7)
    assert cache.fetch() == (True, 32)
    cache.check_rows(32)
    back = cache.content()
    assert back.items() <= content.items()
    assert back or all(not group.on_device for group in cache.manager.config.groups)
    assert cache.fetch() == (False, 32)
    stats = cache.offloaded.stats()
    assert (stats.host_hit_tokens, stats.disk_hit_tokens) in ((32, 0), (0, 32))
    cache.offloaded.close()


def _damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("mix", GROUP_MIXES)
@pytest.mark.parametrize("harm", [Path.unlink, _damage])
def test_a_lost_or_damaged_block_costs_only_hits(
    mix: str, harm: Callable[[Path], None], tmp_path: Path
) -> None:
    cache = Cache(mix, "disk", tmp_path)
    content = cache.compute()
    disk = cache.offloaded.disk
    assert disk is not None and disk.flush()
    files = sorted(tmp_path.rglob("*.block"))
    for file in files:
        whole = file.read_bytes()
        harm(file)
        cache.manager.reset_prefix_cache()
        cache.memory.buffer.fill_(7)
        _, num_tokens = cache.fetch()
        assert num_tokens % BLOCK_SIZE == 0
        assert cache.content().items() <= content.items()
        if num_tokens:
            cache.check_rows(num_tokens)
        file.write_bytes(whole)
    disk.close()


def test_nothing_is_fetched_for_a_request_that_does_not_fit(tmp_path: Path) -> None:
    cache = Cache("full", "disk", tmp_path)
    cache.compute()
    small = Cache("full", "disk", tmp_path, num_large_pages=8)
    assert cache.offloaded.disk is not None
    cache.offloaded.disk.close()
    assert small.fetch() == (False, 0)


def test_running_requests_keep_their_blocks(tmp_path: Path) -> None:
    cache = Cache("gemma", "disk", tmp_path)
    cache.compute()
    cache.manager.reset_prefix_cache()
    other = hashes_of(range(100, 120), BLOCK_SIZE)
    assert cache.manager.allocate_slots("other", 20, block_hashes=other)
    held = [cache.manager.block_ids("other", group_id) for group_id in (0, 1)]
    before = [
        [page.clone() for page in cache.memory.read_pages(group_id, ids)]
        for group_id, ids in enumerate(held)
    ]
    assert cache.fetch() == (True, 32)
    for group_id, ids in enumerate(held):
        assert cache.manager.block_ids("other", group_id) == ids
        for now, then in zip(cache.memory.read_pages(group_id, ids), before[group_id], strict=True):
            assert torch.equal(now, then)
    cache.offloaded.close()
