"""Checks that the bookkeeping of a cache agrees with itself, and says which equation does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from prefix_cache.block import KVCacheBlock
from prefix_cache.block_pool import BlockPool
from prefix_cache.kv_cache_manager import KVCacheManager

__all__ = ["IntegrityError", "check_integrity", "check_pool_integrity"]


class IntegrityError(RuntimeError):
    """Two records of the same fact differ; the message prints both with their numbers."""


def check_integrity(manager: KVCacheManager) -> None:
    """Check a manager and its pool; meant for tests and for ``verify`` runs, not for every step.

    Raises:
        IntegrityError: with the equation that failed.
    """
    _check_requests(manager)
    tables = [
        table for group in manager.coordinator.managers for table in group.block_tables.values()
    ]
    check_pool_integrity(manager.pool, tables)


def check_pool_integrity(pool: BlockPool, tables: Iterable[Sequence[KVCacheBlock]]) -> None:
    """Check a pool against all tables that hold its blocks.

    Raises:
        IntegrityError: with the equation that failed.
    """
    _check_null_block(pool)
    _check_conservation(pool)
    _check_references(pool, Counter(block.block_id for table in tables for block in table))
    _check_queues(pool)
    _check_hash_table(pool)
    _check_generations(pool)


def _check_requests(manager: KVCacheManager) -> None:
    live = manager.request_ids
    for group in manager.coordinator.managers:
        if group.block_tables.keys() != live:
            raise IntegrityError(
                f"requests with a table in group {group.group_id} "
                f"{sorted(group.block_tables)} != live requests {sorted(live)}"
            )
    for block_hash, owners in manager.pending.owners.items():
        if not owners or not owners <= live:
            raise IntegrityError(
                f"pending hash {_short(block_hash)} is owned by {sorted(owners)}, "
                f"expected a non-empty part of the live requests {sorted(live)}"
            )


def _check_null_block(pool: BlockPool) -> None:
    null = pool.null_block
    if null.ref_cnt or null.generation or null.block_hash is not None:
        raise IntegrityError(
            f"null block: ref_cnt ({null.ref_cnt}), generation ({null.generation}), block_hash "
            f"({_short(null.block_hash)}), expected 0, 0, None"
        )


def _check_conservation(pool: BlockPool) -> None:
    free, cached = len(pool.free_queue), len(pool.cached_queue)
    held = sum(block.ref_cnt > 0 for block in pool.blocks[1:])
    total = free + held + cached + 1
    if total != pool.num_blocks:
        raise IntegrityError(
            f"free ({free}) + held ({held}) + cached ({cached}) + null (1) = {total}, "
            f"expected num_blocks = {pool.num_blocks}"
        )


def _check_references(pool: BlockPool, num_holders: Counter[int]) -> None:
    for block in pool.blocks:
        if block.ref_cnt != num_holders[block.block_id]:
            raise IntegrityError(
                f"block {block.block_id}: ref_cnt ({block.ref_cnt}) != "
                f"places in block tables ({num_holders[block.block_id]})"
            )


def _check_queues(pool: BlockPool) -> None:
    for block in pool.blocks[1:]:
        has_hash = block.block_hash is not None
        actual = (block in pool.free_queue, block in pool.cached_queue)
        expected = (block.ref_cnt == 0 and not has_hash, block.ref_cnt == 0 and has_hash)
        if actual != expected:
            raise IntegrityError(
                f"block {block.block_id} (ref_cnt {block.ref_cnt}, hash "
                f"{_short(block.block_hash)}): in (free queue, cached queue) = {actual}, "
                f"expected {expected}"
            )


def _check_hash_table(pool: BlockPool) -> None:
    for (group_id, block_hash), block in pool.hash_table.items():
        if (block.group_id, block.block_hash) != (group_id, block_hash):
            raise IntegrityError(
                f"hash table entry (group {group_id}, {_short(block_hash)}) leads to block "
                f"{block.block_id}, which has (group {block.group_id}, "
                f"{_short(block.block_hash)})"
            )
    num_hashed = sum(block.block_hash is not None for block in pool.blocks)
    if num_hashed != len(pool.hash_table):
        raise IntegrityError(
            f"blocks with a hash ({num_hashed}) != hash table entries ({len(pool.hash_table)})"
        )


def _check_generations(pool: BlockPool) -> None:
    for block, generation in zip(pool.blocks, pool.generations.tolist(), strict=True):
        if block.generation != generation:
            raise IntegrityError(
                f"block {block.block_id}: generation ({block.generation}) != "
                f"generations[{block.block_id}] ({generation})"
            )


def _short(block_hash: bytes | None) -> str:
    return "None" if block_hash is None else block_hash.hex()[:12]
