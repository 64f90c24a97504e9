"""Offloading of blocks that the pool may evict to host memory or disk, and loading them back.

::

    publish ──► store:  page and rows of the block, copied once, to the tiers
    admission ─► fetch: blocks that the pool lacks and the tiers have become unheld blocks of the
                        pool, as if they had never been evicted; then the prefix is searched again

So hits, groups and evictions do not depend on tiers: a prefix is found in the pool or not at all. A
fetched block is published only when its page and all of its rows are written.

A block's bytes are its page without padding, followed by the mirrored rows of each tensor, in order
of their names. Rows are stored with the pages of the groups by which they are mirrored.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from math import prod
from typing import Literal

import torch
from torch import Tensor

from prefix_cache.blocks.block import BlockHash, KVCacheBlock
from prefix_cache.blocks.block_pool import BlockPool
from prefix_cache.kv_cache.kv_cache_manager import CachedPrefix, EncoderBlocks, KVCacheManager
from prefix_cache.layer_types.coordinator import KVCacheCoordinator, SingleTypeKVCacheManager
from prefix_cache.stores.offload_tiers import DiskTier, HostTier, OffloadStats, TierKey
from prefix_cache.stores.paged_memory import PagedMemory
from prefix_cache.stores.stage_output_cache import StageOutputCache

# Padded, so that the data after it is aligned.
_NUM_ROWS = struct.Struct("<Q8x")


class _PoolAndTiers(BlockPool):
    """Union of the pool and the tiers as a lookup-only pool; other operations do not work.

    A block that only the tiers have has the id -1 and no page.
    """

    def __init__(self, offloaded: OffloadedBlocks, pool: BlockPool) -> None:
        super().__init__(pool.arenas)
        self._offloaded = offloaded
        self._pool = pool

    def lookup(self, group_id: int, block_hash: BlockHash) -> KVCacheBlock | None:
        """Find a block whose wanted rows are present too."""
        block = self._pool.lookup(group_id, block_hash)
        if block is not None and self._offloaded.has_rows(block):
            return block
        if self._offloaded.has(group_id, block_hash):
            return KVCacheBlock(-1, group_id, None, block_hash=block_hash)
        return None


@dataclass(slots=True)
class OffloadedBlocks:
    """Tiers below one manager's pool."""

    manager: KVCacheManager
    memory: PagedMemory
    host: HostTier | None = None
    disk: DiskTier | None = None
    # Content from before a reset has another salt.
    _salt: bytes = b""
    _unusable: set[TierKey] = field(default_factory=set)
    _counts: OffloadStats = field(default_factory=OffloadStats)

    def store(self, request_id: str, first_block: int) -> None:
        """Store a request's published blocks from ``first_block`` on; their rows must be written.

        States are stored only at chunk ends of a prefill, because there are too many others.
        """
        stops = self.manager.coordinator.stops.get(request_id)
        for manager in self.manager.coordinator.managers:
            if not manager.follows_tokens:
                continue
            table = manager.table(request_id)[first_block:]
            if manager.keeps_states:
                ends = () if stops is None else stops.ends
                size = manager.block_size
                table = [
                    block for i, block in enumerate(table, first_block) if (i + 1) * size in ends
                ]
            self._store(manager, table)

    def store_encoder(self, request_id: str, num_tokens: int) -> None:
        """Store the published blocks of a request's encoder sequence."""
        for manager in self.manager.coordinator.encoder_managers:
            self._store(manager, manager.table(request_id), num_tokens)

    def fetch(
        self,
        prefix: CachedPrefix,
        block_hashes: Sequence[BlockHash],
        num_tokens: int,
        encoder: EncoderBlocks | None = None,
        *,
        headroom: int = 0,
    ) -> bool:
        """Load blocks from the tiers that make a longer prefix available.

        Args:
            prefix: the prefix just found in the pool alone, with the same other arguments. Nothing
                is fetched for a request that would not fit.
            headroom: see :meth:`KVCacheManager.can_finish`.

        Returns:
            True if blocks were fetched, so that the prefix must be searched again.
        """
        self._unusable.clear()
        while True:
            found = self._find(prefix, block_hashes, num_tokens, encoder)
            lacking = [block for block in found if block.block_id < 0]
            if not lacking or not self.manager.can_finish(
                num_tokens,
                prefix=prefix,
                num_encoder_tokens=encoder.num_tokens if encoder is not None else 0,
                headroom=headroom,
            ):
                return False
            fetched = self._fetch(found, lacking)
            if fetched is not None:
                return fetched

    def has(self, group_id: int, block_hash: BlockHash) -> bool:
        """Return True if a tier appears to have a block."""
        key = self._key(group_id, block_hash)
        if key in self._unusable:
            return False
        return (self.host is not None and key in self.host) or (
            self.disk is not None and key in self.disk
        )

    def has_rows(self, block: KVCacheBlock) -> bool:
        """Return True if the pool has all wanted rows of a block, not counting encoder rows.

        Encoder rows are checked for all blocks of their sequence together.
        """
        if block.group_id != self.manager.mirrored_group_id:
            return True
        return self.manager.stage_outputs.num_valid_blocks([block.block_id]) == 1

    def forget(self) -> None:
        """Make everything stored so far unfindable."""
        self._salt = os.urandom(16)
        self.host = None if self.host is None else HostTier(self.host.capacity_bytes)

    def close(self) -> None:
        """Write the queued blocks to disk and stop the background thread."""
        if self.disk is not None:
            self.disk.close()

    def stats(self) -> OffloadStats:
        """Return the counters and the sizes of the tiers."""
        found = self._counts
        if self.host is not None:
            found = replace(found, host_bytes=self.host.nbytes)
        if self.disk is not None:
            found = replace(
                found,
                dropped=self.disk.num_dropped,
                damaged=self.disk.num_damaged,
                errors=self.disk.num_errors,
                disk_bytes=self.disk.nbytes,
            )
        return found

    def _key(self, group_id: int, block_hash: BlockHash) -> TierKey:
        digest = hashlib.sha256(b"tier" + self._salt)
        digest.update(struct.pack("<Q", group_id) + block_hash)
        digest.update(repr(_types(self.manager.outputs.by_group.get(group_id))).encode())
        return digest.digest()

    def _store(
        self,
        manager: SingleTypeKVCacheManager,
        table: Sequence[KVCacheBlock],
        num_tokens: int | None = None,
    ) -> None:
        """Store the published blocks of a table of ``num_tokens`` rows (None: all are full)."""
        size = manager.block_size
        blocks = [
            (block, block.block_hash, size if num_tokens is None else num_tokens - index * size)
            for index, block in enumerate(table)
            if block.large_page is not None and block.block_hash is not None
        ]
        blocks = [each for each in blocks if not self.has(manager.group_id, each[1])]
        if not blocks:
            return
        group_id = manager.group_id
        if self.manager.config.groups[group_id].on_device:
            pages = self.memory.read_pages(group_id, [block.block_id for block, _, _ in blocks])
        else:
            pages = [torch.empty(0, dtype=torch.uint8)] * len(blocks)
        for (block, block_hash, rest), page in zip(blocks, pages, strict=True):
            num_rows = min(rest, size)
            rows = self._read_rows(group_id, block, num_rows)
            if rows is None:
                continue  # a hit would be useless without them
            data = bytearray().join(
                [_NUM_ROWS.pack(num_rows), _as_bytes(page), *map(_as_bytes, rows)]
            )
            key = self._key(group_id, block_hash)
            if self.host is not None:
                self.host.put(key, data)
            if self.disk is not None:
                self.disk.put(key, data)
            self._counts = replace(self._counts, stored=self._counts.stored + 1)

    def _read_rows(self, group_id: int, block: KVCacheBlock, num_rows: int) -> list[Tensor] | None:
        rows_of = self.manager.outputs.by_group.get(group_id)
        if rows_of is None:
            return []
        names = sorted(rows_of.wanted)
        rows = rows_of.gather([block.block_id], num_rows, names=names)
        return [rows[name] for name in names] if len(rows) == len(names) else None

    def _find(
        self,
        prefix: CachedPrefix,
        block_hashes: Sequence[BlockHash],
        num_tokens: int,
        encoder: EncoderBlocks | None,
    ) -> list[KVCacheBlock]:
        """Return the blocks of the longest hit in pool and tiers, if longer than the pool's alone.

        They are in release order, so that the last ones are evicted last.
        """
        size = self.manager.block_size
        num_blocks = num_hit = prefix.num_tokens // size
        end = min((num_tokens - 1) // size, len(block_hashes))
        both = _PoolAndTiers(self, self.manager.pool)
        complete = self.manager.mirrored_group_id
        while num_blocks < end and both.lookup(complete, block_hashes[num_blocks]) is not None:
            num_blocks += 1
        found: list[KVCacheBlock] = []
        if num_blocks > num_hit:
            coordinator = KVCacheCoordinator(self.manager.config, both, 1)
            hit = coordinator.find_longest_cache_hit(block_hashes, num_blocks * size)
            if len(hit[complete]) > num_hit:
                found = [b for blocks in hit for b in reversed(blocks) if b.block_hash is not None]
        if encoder is not None and not prefix.encoder_cached:
            for manager in self.manager.coordinator.encoder_managers:
                # From the tiers even if the pool has the block, because its rows may be missing.
                blocks = [
                    KVCacheBlock(-1, manager.group_id, None, block_hash=key)
                    if self.has(manager.group_id, key)
                    else self.manager.pool.lookup(manager.group_id, key)
                    for key in encoder.hashes
                ]
                if any(block is None for block in blocks):
                    return found
                found += [block for block in blocks if block is not None]
        return found

    def _fetch(self, found: Sequence[KVCacheBlock], lacking: Sequence[KVCacheBlock]) -> bool | None:
        """Fetch the missing blocks of a hit; None if one was unreadable, which is now unusable."""
        pool = self.manager.pool
        held = [block for block in found if block.block_id >= 0]
        for block in held:
            pool.touch(block)
        needs = Counter(block.group_id for block in lacking)
        if not pool.can_allocate(needs):
            pool.release(held)
            return False
        taken = {group_id: iter(blocks) for group_id, blocks in pool.allocate(needs).items()}
        pairs = [(next(taken[block.group_id]), block) for block in lacking]
        # Reading stops at the first failure.
        tiers = list(takewhile(bool, (self._read(block, wanted) for block, wanted in pairs)))
        is_whole = len(tiers) == len(pairs)
        if is_whole:
            for block, wanted in pairs:
                if wanted.block_hash is not None:
                    pool.publish(block, wanted.block_hash)
            self._count_hits(tiers, lacking)
        fetched = iter(pairs)
        pool.release(b if b.block_id >= 0 else next(fetched)[0] for b in found)
        return True if is_whole else None

    def _read(self, block: KVCacheBlock, wanted: KVCacheBlock) -> Literal["host", "disk"] | None:
        """Fill a pool block from a tier; on failure, mark its key unusable and return None."""
        if wanted.block_hash is None:
            return None
        key = self._key(wanted.group_id, wanted.block_hash)
        data = None if self.host is None else self.host.get(key)
        if data is not None and self._fill(block, data):
            return "host"
        data = None if self.disk is None else self.disk.get(key)
        if data is not None and self._fill(block, data):
            if self.host is not None:
                self.host.put(key, data)
            return "disk"
        self._unusable.add(key)
        return None

    def _fill(self, block: KVCacheBlock, data: bytearray) -> bool:
        """Write page and rows of a block; return False if the data does not match its layout."""
        group = self.manager.config.groups[block.group_id]
        rows_of = self.manager.outputs.by_group.get(block.group_id)
        page_bytes = group.content_bytes if group.on_device else 0
        (num_rows,) = _NUM_ROWS.unpack_from(data)
        offset = _NUM_ROWS.size + page_bytes
        rows: dict[str, Tensor] = {}
        for name, (dtype, shape) in _types(rows_of).items():
            count = num_rows * prod(shape)
            if offset + count * dtype.itemsize > len(data):
                return False
            flat = torch.frombuffer(data, dtype=dtype, count=count, offset=offset)
            rows[name] = flat.reshape(num_rows, *shape)
            offset += count * dtype.itemsize
        if offset != len(data) or num_rows > group.spec.block_size:
            return False
        if page_bytes:
            page = torch.frombuffer(
                data, dtype=torch.uint8, count=page_bytes, offset=_NUM_ROWS.size
            )
            self.memory.write_page(block.group_id, block.block_id, page)
        if rows_of is not None:
            block_id = torch.tensor([block.block_id])
            rows_of.write(rows_of.slots(block_id)[:num_rows], rows)
        return True

    def _count_hits(self, tiers: Sequence[str | None], blocks: Sequence[KVCacheBlock]) -> None:
        of_tokens = [
            tier
            for tier, block in zip(tiers, blocks, strict=True)
            if block.group_id == self.manager.mirrored_group_id
        ]
        size = self.manager.block_size
        self._counts = replace(
            self._counts,
            host_hit_tokens=self._counts.host_hit_tokens + of_tokens.count("host") * size,
            disk_hit_tokens=self._counts.disk_hit_tokens + of_tokens.count("disk") * size,
        )


def _types(rows_of: StageOutputCache | None) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of the wanted rows by name, sorted by name."""
    if rows_of is None:
        return {}
    types = rows_of.row_types
    return {name: types[name] for name in sorted(rows_of.wanted) if name in types}


def _as_bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
