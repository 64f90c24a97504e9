"""One manager per KV-cache group, moved in step: a request has all its tables or none."""

from __future__ import annotations

from collections.abc import Sequence

from prefix_cache.block import KVCacheBlock
from prefix_cache.block_hash import BlockHash
from prefix_cache.block_pool import BlockPool
from prefix_cache.full_attention_manager import FullAttentionManager
from prefix_cache.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from prefix_cache.single_type_manager import SingleTypeKVCacheManager

__all__ = ["MANAGER_TYPES", "KVCacheCoordinator"]

MANAGER_TYPES: dict[type[KVCacheSpec], type[SingleTypeKVCacheManager]] = {
    FullAttentionSpec: FullAttentionManager,
}
"""Which manager keeps the tables of which kind of layer."""


class KVCacheCoordinator:
    """The groups of one engine.

    Args:
        config: the groups; all must have the same block size, to which hashes belong.
        pool: shared by all groups.

    Raises:
        NotImplementedError: for a spec without a manager, or block sizes that differ.
    """

    def __init__(self, config: KVCacheConfig, pool: BlockPool) -> None:
        self.pool = pool
        block_sizes = {group.spec.block_size for group in config.groups}
        if len(block_sizes) > 1:
            raise NotImplementedError(
                f"all KV-cache groups must have one block size, got {sorted(block_sizes)}"
            )
        self.block_size = block_sizes.pop()
        self.managers = tuple(
            _manager_type(group.spec)(group.spec, pool, group_id)
            for group_id, group in enumerate(config.groups)
        )

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_num_tokens: int
    ) -> tuple[tuple[KVCacheBlock, ...], ...]:
        """The longest prefix that every group can serve: one tuple of blocks per group.

        Groups are asked again with the shortest answer as the cap until all agree, since a
        group's hit at one length says nothing about a shorter one (a sliding window needs its
        last blocks only). Changes nothing; valid as long as the managers' answers are.
        """
        while True:
            hits = [m.find_longest_cache_hit(block_hashes, max_num_tokens) for m in self.managers]
            shortest = min(len(hit) for hit in hits)
            if all(len(hit) == shortest for hit in hits):
                return tuple(tuple(hit) for hit in hits)
            max_num_tokens = shortest * self.block_size

    def can_allocate(
        self,
        request_id: str,
        num_tokens: int,
        prefix_blocks: Sequence[Sequence[KVCacheBlock]] = (),
        *,
        headroom: int = 0,
    ) -> bool:
        """Whether all groups can hold ``num_tokens`` of the request. Changes nothing.

        Args:
            request_id: known or not.
            num_tokens: in all.
            prefix_blocks: of a hit that the request would adopt first, per group.
            headroom: blocks that must be left over.
        """
        num_needed = sum(m.num_blocks_needed(request_id, num_tokens) for m in self.managers)
        num_needed -= sum(len(blocks) for blocks in prefix_blocks)
        # Prefix blocks that nobody holds count as free, yet adopting them is what uses them up.
        num_revived = sum(block.ref_cnt == 0 for blocks in prefix_blocks for block in blocks)
        return num_needed + num_revived + headroom <= self.pool.num_free

    def allocate(
        self,
        request_id: str,
        num_tokens: int,
        prefix_blocks: Sequence[Sequence[KVCacheBlock]] = (),
    ) -> bool:
        """Adopt the prefix and grow all tables to ``num_tokens``, or change nothing.

        Returns:
            Whether there were enough blocks.
        """
        if not self.can_allocate(request_id, num_tokens, prefix_blocks):
            return False
        # Adopt in every group first: a new block for one must not evict the prefix of another.
        for manager, blocks in zip(self.managers, prefix_blocks, strict=False):
            manager.adopt(request_id, blocks)
        for manager in self.managers:
            manager.allocate(request_id, num_tokens)
        return True

    def publish(
        self, request_id: str, block_hashes: Sequence[BlockHash], num_computed_tokens: int
    ) -> None:
        """Let full and computed blocks be found, in every group."""
        for manager in self.managers:
            manager.publish(request_id, block_hashes, num_computed_tokens)

    def free(self, request_id: str) -> None:
        """Give back the request's blocks in every group. ``ValueError`` if it is unknown."""
        for manager in self.managers:
            manager.free(request_id)


def _manager_type(spec: KVCacheSpec) -> type[SingleTypeKVCacheManager]:
    manager_type = MANAGER_TYPES.get(type(spec))
    if manager_type is None:
        known = ", ".join(spec_type.__name__ for spec_type in MANAGER_TYPES)
        raise NotImplementedError(f"no manager for {type(spec).__name__}; there are: {known}")
    return manager_type
