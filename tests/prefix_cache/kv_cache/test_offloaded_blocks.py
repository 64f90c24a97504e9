"""Blocks of every mix of groups come back as they were, page and rows, or are not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch

from prefix_cache import (
    CachedPrefix,
    DiskTier,
    EncoderBlocks,
    HostTier,
    KVCacheManager,
    OffloadedBlocks,
    PagedMemory,
    check_integrity,
    whole_input_hash,
)
from tests.support.tiny_kv_cache import GROUP_MIXES, hashes_of, mixed_config

BLOCK_SIZE = 4
NUM_TOKENS = 33
IDS = tuple(range(NUM_TOKENS))
ENCODER = EncoderBlocks.of(whole_input_hash(range(6)), 6, BLOCK_SIZE)
Tier = Literal["host", "disk"]


class Cache:
    """A manager of some groups, its memory and its tiers, and what their blocks should hold."""

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
        # The store of rows is made when the first is written.
        self.manager.stage_outputs.write(torch.zeros(1, dtype=torch.int64), {"rows": self.rows(1)})

    @staticmethod
    def rows(num_tokens: int) -> torch.Tensor:
        return torch.arange(num_tokens * 3, dtype=torch.bfloat16).reshape(num_tokens, 3)

    def content(self) -> dict[tuple[int, bytes], bytes]:
        """What the pages of blocks that can be found hold."""
        pool = self.manager.pool
        found: dict[tuple[int, bytes], bytes] = {}
        for group_id, table in pool.hash_tables.items():
            if self.manager.config.groups[group_id].on_device:
                for block_hash, block in table.items():
                    page = self.memory.read_pages(group_id, [block.block_id])
                    found[group_id, block_hash] = page[0].numpy().tobytes()
        return found

    def compute(self) -> dict[tuple[int, bytes], bytes]:
        """Run a request to the end, in chunks, whose blocks are stored."""
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
                if not manager.config.groups[group.group_id].on_device:
                    continue
                for block in group.table("r"):
                    if block.large_page is not None and block.block_hash is None:
                        page = torch.randint(256, (self.size(group.group_id),), dtype=torch.uint8)
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

    def size(self, group_id: int) -> int:
        return self.manager.config.groups[group_id].content_bytes

    def fetch(self) -> tuple[bool, int]:
        """Whether blocks were fetched, and tokens that are found then."""
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


@pytest.fixture(params=GROUP_MIXES)
def mix(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_blocks_come_back_as_they_were(mix: str, tier: Tier, tmp_path: Path) -> None:
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


def _remove(file: Path) -> None:
    file.unlink()


def _damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("harm", [_remove, _damage])
def test_any_block_that_is_lost_costs_hits_only(
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
