"""Consistency checks of a cache's bookkeeping, which report the equation that fails.

Also the memory cost of pages: bytes that a request needs, holds, and would hold with one page size.

A request of 4 text tokens and 6 image tokens, one cross-attention and two self-attention layers,
block size 1. Each letter is a token of a layer; a dot is wasted memory::

    needed, and held by pages per group      held by pages of one size
    cross   i i i i i i                      cross   i i i i i i . . . .
    self    t t t t                          self    . . . . . . t t t t
    self    t t t t                          self    . . . . . . t t t t
                                                     one page: a column
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from prefix_cache.blocks.block import BlockHash, IntegrityError, KVCacheBlock, LargePage
from prefix_cache.blocks.block_pool import BlockPool, GroupPages, PageArena
from prefix_cache.kv_cache.kv_cache_manager import KVCacheManager
from prefix_cache.specs.kv_cache_spec import (
    AttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    MambaSpec,
)


def needed_bytes(
    groups: Sequence[KVCacheGroup], num_tokens: int, num_encoder_tokens: int = 0
) -> int:
    """Return the bytes that the last of ``num_tokens`` tokens needs, without rounding to blocks."""
    total = 0
    for group in groups:
        spec, by_layer = group.spec, group.spec.layer_page_bytes  # one state or nothing
        if isinstance(spec, AttentionSpec):
            num_needed = spec.num_needed(num_tokens, num_encoder_tokens)
            by_layer = num_needed * (spec.layer_page_bytes // spec.block_size)
        total += len(group.layer_names) * by_layer
    return total


def request_bytes(manager: KVCacheManager, num_tokens: int, num_encoder_tokens: int = 0) -> int:
    """Return the bytes of the pages that one request holds while only its last token runs.

    A prefill step holds more: sliding windows keep the window of the chunk's first token.

    Args:
        manager: manager that knows which blocks the layers still need; its state is not used.
        num_tokens: tokens of the request, including the last one.
    """
    total = 0
    for group, tables in zip(manager.config.groups, manager.coordinator.managers, strict=True):
        if tables.follows_tokens:
            num_blocks = -(-num_tokens // manager.block_size)
            num_blocks -= tables.first_needed_block(num_tokens - 1)
        else:
            num_blocks = tables.max_blocks(num_encoder_tokens)
        total += num_blocks * group.page_bytes
    return total


def one_size_groups(groups: Sequence[KVCacheGroup]) -> tuple[KVCacheGroup, ...]:
    """Return the groups of the same layers under an allocator with a single page size.

    Every token and every encoder token occupies a slot in every attention layer, including windows
    and cross-attention; layers of several widths use the widest. A page holds one block of all
    attention layers. With recurrent layers too, blocks are so long that an attention layer's share
    of a page holds a state, and states are padded to it, equally many layers per page.

    Groups without attention layers have a single size already and are returned unchanged.
    """
    attention = [group.spec for group in groups if isinstance(group.spec, AttentionSpec)]
    states = [(group, group.spec) for group in groups if isinstance(group.spec, MambaSpec)]
    if not attention:
        return tuple(groups)
    widest = max(attention, key=lambda spec: spec.layer_page_bytes)
    largest_state = max((spec.layer_page_bytes for _, spec in states), default=0)
    block_size = widest.block_size * max(1, -(-largest_state // widest.layer_page_bytes))
    shape = (block_size, widest.num_kv_heads, widest.head_dim, widest.dtype)
    names = tuple(
        name
        for group in groups
        if isinstance(group.spec, AttentionSpec)
        for name in group.layer_names
    )
    result = [KVCacheGroup(names, FullAttentionSpec(*shape))]
    if any(isinstance(spec, CrossAttentionSpec) for spec in attention):
        result.append(KVCacheGroup(names, CrossAttentionSpec(*shape)))
    page_bytes = result[0].page_bytes
    for group, spec in states:
        for first in range(0, len(group.layer_names), len(names)):
            layers = group.layer_names[first : first + len(names)]
            padding = page_bytes - len(layers) * spec.layer_page_bytes
            result.append(KVCacheGroup(layers, replace(spec, block_size=block_size), padding))
    return tuple(result)


def check_integrity(manager: KVCacheManager, items: Iterable[Sequence[KVCacheBlock]] = ()) -> None:
    """Check a manager and its pool; for tests and ``verify`` runs, too slow for every step.

    Args:
        items: pages of tower rows, as requests hold them.

    Raises:
        IntegrityError: with the equation that failed.
    """
    _check_requests(manager)
    tables = [
        table for group in manager.coordinator.managers for table in group.block_tables.values()
    ]
    check_pool_integrity(manager.pool, [*tables, *items])


def check_pool_integrity(pool: BlockPool, tables: Iterable[Sequence[KVCacheBlock]]) -> None:
    """Check a pool against all tables. Raises ``IntegrityError`` with the equation that failed."""
    holders = Counter(block for table in tables for block in table if block.large_page)
    for arena in pool.arenas:
        _check_conservation(arena)
        free = {page.page_id for page in arena.free_pages}
        # As lists, because reading tensor elements would take longer than all other checks.
        generations = {g: pages.generations.tolist() for g, pages in arena.groups.items()}
        for page in arena.pages:
            _check_page(arena, page, holders, generations, is_free=page.page_id in free)
        for group in arena.groups.values():
            _check_group(arena, group)
    _check_hash_table(pool)
    for block in holders:
        if block.large_page is None or block not in block.large_page.blocks:
            raise IntegrityError(
                f"block {block.block_id} of group {block.group_id} is in {holders[block]} tables, "
                "but its large page has gone to others"
            )


def _check_requests(manager: KVCacheManager) -> None:
    live = manager.request_ids
    for group in manager.coordinator.managers:
        if group.block_tables.keys() != live:
            raise IntegrityError(
                f"requests with a table in group {group.group_id} "
                f"{sorted(group.block_tables)} != live requests {sorted(live)}"
            )
    pending = manager.pending
    if unknown := pending.hashes.keys() - live:
        raise IntegrityError(
            f"hashes are pending of {sorted(unknown)}, which are not among the live requests "
            f"{sorted(live)}"
        )
    counts = Counter(each for hashes in pending.hashes.values() for each in hashes)
    for block_hash in counts.keys() | pending.counts.keys():
        if counts[block_hash] != pending.counts.get(block_hash):
            raise IntegrityError(
                f"pending hash {_short(block_hash)}: counted {pending.counts.get(block_hash)} "
                f"times, pending of {counts[block_hash]} requests"
            )


def _check_equal(place: str, what: str, actual: object, other: str, expected: object) -> None:
    if actual != expected:
        raise IntegrityError(f"{place}: {what} ({actual}) != {other} ({expected})")


def _check_conservation(arena: PageArena) -> None:
    free, unheld = len(arena.free_pages), len(arena.unheld)
    held = sum(page.num_held > 0 for page in arena.pages)
    total = free + held + unheld + 1
    if total != len(arena.pages):
        raise IntegrityError(
            f"large pages: free ({free}) + held ({held}) + cached ({unheld}) + null (1) = {total}, "
            f"expected num_pages = {len(arena.pages)}"
        )


def _check_page(
    arena: PageArena,
    page: LargePage,
    holders: Counter[KVCacheBlock],
    generations: Mapping[int, Sequence[int]],
    *,
    is_free: bool,
) -> None:
    has_no_group = page.group_id is None
    num_blocks = 0 if page.group_id is None else arena.groups[page.group_id].blocks_per_page
    place = f"large page {page.page_id} of group {page.group_id}"
    _check_equal(place, "blocks", len(page.blocks), "blocks per page", num_blocks)
    if is_free != (has_no_group and page.page_id > 0):
        raise IntegrityError(
            f"large page {page.page_id} serves group {page.group_id}, and free = {is_free}"
        )
    held = 0
    for block in page.blocks:
        generation = generations[block.group_id][block.block_id]
        _check_block(arena, page, block, holders.get(block, 0), generation)
        held += block.ref_cnt > 0
    _check_equal(place, "num_held", page.num_held, "held blocks", held)
    waits = not has_no_group and held == 0
    if waits != (page in arena.unheld):
        raise IntegrityError(
            f"large page {page.page_id} (group {page.group_id}, {held} held blocks): "
            f"waits to be evicted = {not waits}, expected {waits}"
        )


def _check_block(
    arena: PageArena, page: LargePage, block: KVCacheBlock, num_holders: int, generation: int
) -> None:
    group, name = arena.groups[block.group_id], f"block {block.block_id} of group {block.group_id}"
    if block.group_id != page.group_id or block.large_page is not page:
        raise IntegrityError(f"{name} lies in large page {page.page_id} of group {page.group_id}")
    _check_equal(name, "ref_cnt", block.ref_cnt, "places in block tables", num_holders)
    has_hash = block.block_hash is not None
    actual = (block in page.free, block in group.cached)
    expected = (block.ref_cnt == 0 and not has_hash, block.ref_cnt == 0 and has_hash)
    if actual != expected:
        raise IntegrityError(
            f"{name} (ref_cnt {block.ref_cnt}, hash {_short(block.block_hash)}): "
            f"(free, cached) = {actual}, expected {expected}"
        )
    known = f"generations[{block.block_id}]"
    _check_equal(name, "generation", block.generation, known, generation)


def _check_group(arena: PageArena, group: GroupPages) -> None:
    null = group.null_block
    if null.ref_cnt or null.generation or null.block_hash is not None:
        raise IntegrityError(
            f"null block of group {group.group_id}: ref_cnt ({null.ref_cnt}), generation "
            f"({null.generation}), block_hash ({_short(null.block_hash)}), expected 0, 0, None"
        )
    pages = [page for page in arena.pages if page.group_id == group.group_id]
    held = [page for page in pages if page.num_held]
    spare = sum(len(page.blocks) - page.num_held for page in held)
    num_cached = sum(1 for page in pages for _ in page.cached)
    free: dict[bool, list[int]] = {False: [], True: []}
    for page in pages:
        if page.free:
            free[page.num_held > 0].append(page.page_id)
    for what, actual, of_pages, expected in (
        ("num_held", group.num_held, "held blocks of its pages", sum(p.num_held for p in held)),
        ("num_spare", group.num_spare, "blocks in held pages that no request holds", spare),
        ("held_with_free", sorted(group.held_with_free), "such pages", free[True]),
        ("unheld_with_free", sorted(group.unheld_with_free), "such pages", free[False]),
        ("cached queue", len(group.cached), "cached blocks", num_cached),
    ):
        _check_equal(f"group {group.group_id}", what, actual, of_pages, expected)


def _check_hash_table(pool: BlockPool) -> None:
    found = {
        (g, key): block for g, table in pool.hash_tables.items() for key, block in table.items()
    }
    for (group_id, block_hash), block in found.items():
        if (block.group_id, block.block_hash) != (group_id, block_hash):
            raise IntegrityError(
                f"hash table entry (group {group_id}, {_short(block_hash)}) leads to block "
                f"{block.block_id}, which has (group {block.group_id}, "
                f"{_short(block.block_hash)})"
            )
    for key, blocks in pool.older.items():
        _check_older(key, blocks, found.get(key))
    num_older = sum(map(len, pool.older.values()))
    blocks_of_pages = (b for arena in pool.arenas for page in arena.pages for b in page.blocks)
    num_hashed = sum(block.block_hash is not None for block in blocks_of_pages)
    if num_hashed != len(found) + num_older:
        raise IntegrityError(
            f"blocks with a hash ({num_hashed}) != hash table entries ({len(found)}) + "
            f"older blocks of equal content ({num_older})"
        )


def _check_older(
    key: tuple[int, BlockHash], blocks: Sequence[KVCacheBlock], newest: KVCacheBlock | None
) -> None:
    """Check that older blocks of a hash are distinct, held, and of the same content."""
    group_id, block_hash = key
    name = f"older blocks of group {group_id}, {_short(block_hash)}"
    distinct = {*blocks, newest}
    if not blocks or len(distinct) != len(blocks) + 1:
        raise IntegrityError(
            f"{name}: distinct blocks, with the one that is found ({len(distinct)}) != "
            f"older ones ({len(blocks)}) + 1, or there are none"
        )
    for block in blocks:
        if (block.group_id, block.block_hash) != key or block.ref_cnt == 0:
            raise IntegrityError(
                f"{name}: block {block.block_id} has (group {block.group_id}, "
                f"{_short(block.block_hash)}) and ref_cnt ({block.ref_cnt}), expected the same "
                "content, held"
            )


def _short(block_hash: bytes | None) -> str:
    return "None" if block_hash is None else block_hash.hex()[:12]
