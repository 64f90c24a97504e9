"""What of a prompt is computed already, over all groups of layers and the rows beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from prefix_cache.blocks.block_hash import BlockHash
from prefix_cache.kv_cache.cached_prefix import CachedPrefix, EncoderBlocks, PrefixMiss
from prefix_cache.kv_cache.mirrored_outputs import MirroredOutputs
from prefix_cache.kv_cache.pending_blocks import PendingBlocks
from prefix_cache.layer_types.chunk_stops import ChunkStops
from prefix_cache.layer_types.coordinator import KVCacheCoordinator

__all__ = ["PrefixFinder"]


class PrefixFinder:
    """Looks for prefixes; changes and counts nothing, and takes no reference.

    Args:
        coordinator: the blocks that can be found, per group.
        outputs: the rows beside them; a hit whose wanted rows are not there is shortened.
        pending: blocks that running requests compute.
    """

    def __init__(
        self, coordinator: KVCacheCoordinator, outputs: MirroredOutputs, pending: PendingBlocks
    ) -> None:
        self._coordinator = coordinator
        self._outputs = outputs
        self._pending = pending
        self._block_size = coordinator.block_size

    def nothing(self, miss: PrefixMiss, *, encoder_cached: bool) -> CachedPrefix:
        """The prefix of a request of which nothing is found."""
        blocks = ((),) * len(self._coordinator.managers)
        return CachedPrefix(blocks, 0, in_flight=False, encoder_cached=encoder_cached, miss=miss)

    def find(
        self, block_hashes: Sequence[BlockHash], num_tokens: int, encoder: EncoderBlocks | None
    ) -> CachedPrefix:
        """See :meth:`KVCacheManager.find_cached_prefix`."""
        prefix = self._find_tokens(block_hashes, num_tokens)
        return prefix if encoder is None else self._with_encoder(prefix, encoder)

    def check(
        self, prefix: CachedPrefix, num_tokens: int, block_hashes: Sequence[BlockHash]
    ) -> None:
        """Raise ``ValueError`` unless a prefix fits these tokens and is cached still."""
        if prefix.num_tokens > num_tokens:
            raise ValueError(
                f"a prefix of {prefix.num_tokens} tokens does not fit into {num_tokens} tokens"
            )
        expected = block_hashes[: prefix.num_tokens // self._block_size]
        for manager in self._coordinator.managers:
            if not manager.follows_tokens:
                continue
            blocks = prefix.blocks[manager.group_id]
            pairs = zip(blocks, expected, strict=False)
            current = all(b.large_page is None or b.block_hash == h for b, h in pairs)
            if not current or len(blocks) not in (0, len(expected)):
                raise ValueError(
                    f"the prefix of {prefix.num_tokens} tokens is not (or no longer) cached "
                    f"under the {len(block_hashes)} block hashes given: find it again"
                )

    def _find_tokens(self, block_hashes: Sequence[BlockHash], num_tokens: int) -> CachedPrefix:
        max_num_tokens = num_tokens - 1
        if max_num_tokens < 1:
            return self.nothing("short", encoder_cached=True)
        blocks = self._coordinator.find_longest_cache_hit(block_hashes, max_num_tokens)
        num_valid = self._outputs.num_valid_blocks(blocks)
        lacks_rows = num_valid < len(blocks[self._outputs.group_id])
        if lacks_rows:
            # Asked again, not cut: other groups may have no hit of just this length.
            blocks = self._coordinator.find_longest_cache_hit(
                block_hashes, num_valid * self._block_size
            )
        num_hit_blocks = len(blocks[self._outputs.group_id])
        end = min(max_num_tokens // self._block_size, len(block_hashes))
        in_flight = num_hit_blocks < end and block_hashes[num_hit_blocks] in self._pending
        num_hit_tokens = num_hit_blocks * self._block_size
        stops = self._plan_stops(block_hashes, num_tokens, num_hit_tokens)
        miss = self._miss(block_hashes, num_hit_blocks, end, lacks_rows=lacks_rows)
        return CachedPrefix(blocks, num_hit_tokens, in_flight, stops, miss=miss)

    def _miss(
        self, block_hashes: Sequence[BlockHash], num_hit_blocks: int, end: int, *, lacks_rows: bool
    ) -> PrefixMiss | None:
        """Why a hit ends before a block; ``end`` is that before which hits end at the latest."""
        pool = self._coordinator.pool
        following = block_hashes[num_hit_blocks : num_hit_blocks + 1]
        is_cached = self._outputs.num_blocks_found(following) > 0
        if num_hit_blocks == end:
            return "last_token" if is_cached else "short" if end == 0 else None
        if is_cached:
            return "rows" if lacks_rows else "group"
        return "evicted" if pool.was_evicted(following[0]) else "unseen"

    def _with_encoder(self, prefix: CachedPrefix, encoder: EncoderBlocks) -> CachedPrefix:
        blocks = list(prefix.blocks)
        cached = True
        for manager in self._coordinator.encoder_managers:
            hit = manager.find_longest_cache_hit(encoder.hashes, encoder.num_tokens)
            blocks[manager.group_id] = tuple(hit)
            cached &= len(hit) == len(encoder.hashes)
        if cached and self._outputs.has_encoder_rows(blocks, encoder.num_tokens):
            return replace(prefix, blocks=tuple(blocks))
        in_flight = prefix.in_flight or encoder.hashes[0] in self._pending
        return replace(prefix, in_flight=in_flight, encoder_cached=False)

    def _plan_stops(
        self, block_hashes: Sequence[BlockHash], num_tokens: int, num_hit_tokens: int
    ) -> ChunkStops | None:
        """Where states of this request are worth keeping: none without recurrent layers."""
        if not self._coordinator.state_managers:
            return None
        last = (num_tokens - 1) // self._block_size * self._block_size
        parting = self._coordinator.longest_hit_but_for_states(block_hashes, num_tokens - 1)
        ends = sorted({end for end in (parting, last) if end > num_hit_tokens})
        return ChunkStops(self._block_size, tuple(ends))
