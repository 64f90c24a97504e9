"""One manager per KV-cache group, moved in step: a request has all its tables or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefix_cache.blocks.block import KVCacheBlock
from prefix_cache.blocks.block_hash import BlockHash
from prefix_cache.blocks.block_pool import BlockPool
from prefix_cache.layer_types.single_type_manager import (
    ChunkedLocalAttentionManager,
    CrossAttentionManager,
    FullAttentionManager,
    MambaManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)
from prefix_cache.specs.kv_cache_config import KVCacheConfig
from prefix_cache.specs.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HostOnlySpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

__all__ = ["MANAGER_TYPES", "ChunkStops", "KVCacheCoordinator"]


@dataclass(frozen=True, slots=True)
class ChunkStops:
    """Ends of chunks for models whose layers keep states.

    A state is known only after the last token of a step. A request of 20 tokens in blocks of 4,
    whose first 12 another request has in common, with a budget of 10 tokens a step::

        tokens  | 0 . . . . . . . | 8 . . . | 12 . . . | 16 . . . |
        chunks  | 8               | 4       | 4        | 4        |
                  whole blocks      shared    last whole block that leaves a token to run

    Attributes:
        block_size: tokens per block; states are found at the ends of blocks.
        ends: numbers of tokens, whole blocks, after which a chunk must end.
    """

    block_size: int
    ends: tuple[int, ...]

    def clip(self, start: int, num_tokens: int, total: int) -> int:
        """How many of ``num_tokens`` tokens from ``start`` on to run now, at least 1.

        Args:
            start: tokens computed.
            num_tokens: that the budget allows.
            total: tokens of the sequence so far; a chunk that does not reach it ends with a block.
        """
        end = start + num_tokens
        if end < total:
            whole = end // self.block_size * self.block_size
            end = whole if whole > start else end
        return min([end, *(stop for stop in self.ends if stop > start)]) - start


MANAGER_TYPES: dict[type[KVCacheSpec], type[SingleTypeKVCacheManager]] = {
    FullAttentionSpec: FullAttentionManager,
    SlidingWindowSpec: SlidingWindowManager,
    ChunkedLocalAttentionSpec: ChunkedLocalAttentionManager,
    MambaSpec: MambaManager,
    CrossAttentionSpec: CrossAttentionManager,
    HostOnlySpec: FullAttentionManager,
}
"""Which manager keeps the tables of which kind of layer."""

Hit = tuple[tuple[KVCacheBlock, ...], ...]


class KVCacheCoordinator:
    """The groups of one engine.

    Args:
        config: the groups; all must have the same block size, to which hashes belong.
        pool: shared by all groups.
        max_num_batched_tokens: most tokens of a request that a step runs.

    Attributes:
        stops: per request whose states are kept, where its prefill should end its chunks.

    Raises:
        NotImplementedError: for a spec without a manager, or block sizes that differ.
    """

    def __init__(self, config: KVCacheConfig, pool: BlockPool, max_num_batched_tokens: int) -> None:
        self.pool = pool
        block_sizes = {group.spec.block_size for group in config.groups}
        if len(block_sizes) > 1:
            raise NotImplementedError(
                f"all KV-cache groups must have one block size, got {sorted(block_sizes)}"
            )
        self.block_size = block_sizes.pop()
        self.managers = tuple(
            _manager_type(group.spec)(group.spec, pool, group_id, max_num_batched_tokens)
            for group_id, group in enumerate(config.groups)
        )
        self.state_managers = [m for m in self.managers if isinstance(m, MambaManager)]
        self.encoder_managers = [m for m in self.managers if not m.follows_tokens]
        self._token_managers = [m for m in self.managers if m.follows_tokens]
        # Per request, tokens that its tables hold, and computed tokens at which blocks can be
        # given back: below both there is nothing to do, which is so in most decode steps.
        self._settled: dict[str, tuple[int, int]] = {}
        self.stops: dict[str, ChunkStops] = {}

    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_num_tokens: int) -> Hit:
        """The longest prefix that every group can serve: one tuple of blocks per group.

        Groups are asked again with the shortest answer as the cap until all agree, since a
        group's hit at one length says nothing about a shorter one (a sliding window needs its
        last blocks only). Changes nothing; valid as long as the managers' answers are.

        Returns:
            As many blocks for every group that follows the tokens, null ones where it needs none.
        """
        hits = _agree(self._token_managers, block_hashes, max_num_tokens, self.block_size)
        return tuple(tuple(hits.get(m.group_id, ())) for m in self.managers)

    def longest_hit_but_for_states(
        self, block_hashes: Sequence[BlockHash], max_num_tokens: int
    ) -> int:
        """Tokens of the longest prefix that all groups but the recurrent ones can serve.

        So much an earlier request had in common, others may too: a state is worth keeping there.
        """
        managers = [m for m in self._token_managers if not m.keeps_states]
        hits = _agree(managers, block_hashes, max_num_tokens, self.block_size)
        return min((len(hit) for hit in hits.values()), default=0) * self.block_size

    def can_finish(
        self,
        num_tokens: int,
        prefix_blocks: Sequence[Sequence[KVCacheBlock]] = (),
        *,
        num_encoder_tokens: int = 0,
        headroom: int = 0,
    ) -> bool:
        """Whether a new request could go on to ``num_tokens`` if no other took a block.

        Changes nothing.

        Args:
            num_tokens: in all.
            prefix_blocks: of a hit that the request would adopt first, per group.
            num_encoder_tokens: for cross-attention.
            headroom: blocks that must be left over in every group that grows.
        """
        needs: dict[int, int] = {}
        for manager in self.managers:
            if manager.follows_tokens:
                num_prefix = len(prefix_blocks[manager.group_id]) if prefix_blocks else 0
                needs[manager.group_id] = headroom + manager.num_blocks_to_finish(
                    num_tokens, num_prefix * self.block_size
                )
            else:
                num_found = len(prefix_blocks[manager.group_id]) if prefix_blocks else 0
                needs[manager.group_id] = manager.max_blocks(num_encoder_tokens) - num_found
        revived = (block for blocks in prefix_blocks for block in blocks if block.large_page)
        return self.pool.can_allocate(needs, revived)

    def allocate(
        self,
        request_id: str,
        num_tokens: int,
        prefix_blocks: Sequence[Sequence[KVCacheBlock]] = (),
        *,
        num_computed_tokens: int = 0,
        num_encoder_tokens: int = 0,
    ) -> bool:
        """Adopt the prefix and grow all tables to ``num_tokens``, or change no table's length.

        Either way, blocks that later tokens than the computed ones cannot need go back first.

        Returns:
            Whether there were enough blocks.
        """
        num_held, next_release = self._settled.get(request_id, (-1, 0))
        if num_computed_tokens >= next_release:
            for manager in self.managers:
                manager.release_unneeded(request_id, num_computed_tokens)
            next_release = min(m.next_release(num_computed_tokens) for m in self.managers)
        if num_tokens <= num_held:
            self._settled[request_id] = (num_held, next_release)
            return True
        needs: dict[int, int] = {}
        for manager in self.managers:
            num_prefix = len(prefix_blocks[manager.group_id]) if prefix_blocks else 0
            wanted = num_tokens if manager.follows_tokens else num_encoder_tokens
            needs[manager.group_id] = manager.num_blocks_needed(request_id, wanted, num_prefix)
        if any(needs.values()) or prefix_blocks:
            revived = (block for blocks in prefix_blocks for block in blocks if block.large_page)
            if not self.pool.can_allocate(needs, revived):
                return False
        # Adopt in every group first: a new block for one must not evict the prefix of another.
        for manager, blocks in zip(self.managers, prefix_blocks, strict=False):
            manager.adopt(request_id, blocks)
        near = {m.group_id: m.last_page(request_id) for m in self.managers if needs[m.group_id]}
        blocks_of = self.pool.allocate(needs, near) if near else {}
        for manager in self.managers:
            manager.extend(request_id, blocks_of.get(manager.group_id, ()), num_tokens)
        num_held = -(-num_tokens // self.block_size) * self.block_size
        self._settled[request_id] = (num_held, next_release)
        return True

    def keep_stops(self, request_id: str, stops: ChunkStops | None) -> None:
        """Note where a request's prefill should end its chunks; states are kept there."""
        if stops is None:
            return
        self.stops[request_id] = stops
        for manager in self.state_managers:
            manager.keep(request_id, stops.ends)

    def max_blocks(self, num_tokens: int, num_encoder_tokens: int = 0) -> dict[int, int]:
        """Per group, most blocks that one request of ``num_tokens`` ever holds at once."""
        return {
            m.group_id: m.max_blocks(num_tokens if m.follows_tokens else num_encoder_tokens)
            for m in self.managers
        }

    def publish(
        self, request_id: str, block_hashes: Sequence[BlockHash], num_computed_tokens: int
    ) -> None:
        """Let full and computed blocks be found, in every group that follows the tokens."""
        for manager in self._token_managers:
            manager.publish(request_id, block_hashes, num_computed_tokens)

    def free(self, request_id: str) -> None:
        """Give back the request's blocks in every group. ``ValueError`` if it is unknown."""
        self._settled.pop(request_id, None)
        self.stops.pop(request_id, None)
        for manager in self.managers:
            manager.free(request_id)


def _agree(
    managers: Sequence[SingleTypeKVCacheManager],
    block_hashes: Sequence[BlockHash],
    max_num_tokens: int,
    block_size: int,
) -> dict[int, list[KVCacheBlock]]:
    """Each manager's blocks of the longest hit that all of them have, by group id."""
    while managers:
        hits = {
            m.group_id: m.find_longest_cache_hit(block_hashes, max_num_tokens) for m in managers
        }
        shortest = min(len(hit) for hit in hits.values())
        if all(len(hit) == shortest for hit in hits.values()):
            return hits
        max_num_tokens = shortest * block_size
    return {}


def _manager_type(spec: KVCacheSpec) -> type[SingleTypeKVCacheManager]:
    manager_type = MANAGER_TYPES.get(type(spec))
    if manager_type is None:
        known = ", ".join(spec_type.__name__ for spec_type in MANAGER_TYPES)
        raise NotImplementedError(f"no manager for {type(spec).__name__}; there are: {known}")
    return manager_type
