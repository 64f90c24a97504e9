"""What the scheduler talks to: find a prefix, take blocks, publish what was computed, give back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from prefix_cache.block import KVCacheBlock
from prefix_cache.block_hash import BlockHash
from prefix_cache.block_pool import BlockPool
from prefix_cache.coordinator import KVCacheCoordinator
from prefix_cache.kv_cache_spec import FullAttentionSpec, KVCacheConfig
from prefix_cache.pending_blocks import PendingBlocks
from prefix_cache.stage_output_cache import StageOutputCache

__all__ = ["CachedPrefix", "KVCacheManager", "KVCacheStats"]


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """What of a prompt is computed already. No reference is held: valid until the next change.

    Attributes:
        blocks: per group, the blocks that hold the prefix.
        num_tokens: its length, whole blocks, at most one token less than the prompt.
        in_flight: the next full block is being computed by a running request; one that can wait
            a step will find it.
    """

    blocks: tuple[tuple[KVCacheBlock, ...], ...]
    num_tokens: int
    in_flight: bool


@dataclass(frozen=True, slots=True)
class KVCacheStats:
    """A snapshot. ``free + held + cached + 1 (null) == num_blocks``.

    Attributes:
        num_blocks: of the pool, the null block included.
        free: blocks without content.
        held: blocks in at least one request's table.
        cached: blocks that nobody holds, findable by content until they are evicted.
        evictions: cached blocks given up for others, since the start.
        hit_tokens: tokens that admitted requests found cached, since the start.
        queried_tokens: tokens in full blocks of admitted requests, since the start.
    """

    num_blocks: int
    free: int
    held: int
    cached: int
    evictions: int
    hit_tokens: int
    queried_tokens: int


class KVCacheManager:
    """Blocks, their content, and the outputs mirrored beside them, for the requests of one engine.

    The life of a request::

        find_cached_prefix ─► allocate_slots(prefix) ─► step ─► write outputs ─► publish ─► free
                                     ▲                                             │
                                     └────────────── allocate_slots ◄──────────────┘

    Publishing comes after the step that computed a block *and* after its output rows are written:
    nobody can hit what is still to come. The rows come first:
    ``stage_outputs.write(slot_mapping, tensors)``.

    Args:
        config: blocks and groups; at least one group must be full attention, since its blocks
            are those that outputs are mirrored by.
        enable_prefix_caching: if not, no prefix is ever found and nothing is published; all else
            is the same.
        output_names: mirror these output tensors only; ``None`` mirrors all that are per token.

    Attributes:
        pool: all blocks.
        coordinator: the block tables, per group.
        stage_outputs: output rows by slot of the group ``mirrored_group_id``.
        pending: blocks that running requests compute.

    Raises:
        ValueError: without a full-attention group.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        enable_prefix_caching: bool = True,
        output_names: Collection[str] | None = None,
    ) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.coordinator = KVCacheCoordinator(config, self.pool)
        self.block_size = self.coordinator.block_size
        self.mirrored_group_id = _first_full_attention_group(config)
        self.stage_outputs = StageOutputCache(
            config.num_blocks, self.block_size, self.pool.generations, output_names
        )
        self.pending = PendingBlocks()
        self._enable_prefix_caching = enable_prefix_caching
        # Requests that live, and those among them that hold content from before a reset.
        self._request_ids: set[str] = set()
        self._outdated_ids: set[str] = set()
        self._hit_tokens = 0
        self._queried_tokens = 0

    @property
    def enable_prefix_caching(self) -> bool:
        """Whether prefixes are found and published.

        Setting it raises ``ValueError`` while requests hold blocks.
        """
        return self._enable_prefix_caching

    @enable_prefix_caching.setter
    def enable_prefix_caching(self, enabled: bool) -> None:
        if self._request_ids:
            raise ValueError(
                f"prefix caching cannot be switched while {len(self._request_ids)} "
                "requests hold blocks"
            )
        self._enable_prefix_caching = enabled

    @property
    def request_ids(self) -> frozenset[str]:
        """Requests that hold blocks."""
        return frozenset(self._request_ids)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out now, those with cached content included."""
        return self.pool.num_free

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can hold at all."""
        return self.pool.usable_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that one request of ``num_tokens`` holds, over all groups."""
        return sum(manager.num_blocks_for(num_tokens) for manager in self.coordinator.managers)

    def find_cached_prefix(
        self, block_hashes: Sequence[BlockHash], num_tokens: int
    ) -> CachedPrefix:
        """The longest prefix whose state *and* whose wanted output rows are cached.

        Changes and counts nothing, and takes no reference.

        Args:
            block_hashes: of the sequence's full blocks.
            num_tokens: of the sequence. At least its last token is left to compute, because
                sampling needs that token's logits.
        """
        max_num_tokens = num_tokens - 1
        if not self._enable_prefix_caching or max_num_tokens < 1:
            return CachedPrefix(((),) * len(self.config.groups), 0, in_flight=False)
        blocks = self.coordinator.find_longest_cache_hit(block_hashes, max_num_tokens)
        mirrored_ids = [block.block_id for block in blocks[self.mirrored_group_id]]
        num_valid = self.stage_outputs.num_valid_blocks(mirrored_ids)
        if num_valid < len(mirrored_ids):
            # Asked again, not cut: other groups may have no hit of just this length.
            blocks = self.coordinator.find_longest_cache_hit(
                block_hashes, num_valid * self.block_size
            )
        num_hit_blocks = len(blocks[self.mirrored_group_id])
        end = min(max_num_tokens // self.block_size, len(block_hashes))
        in_flight = num_hit_blocks < end and block_hashes[num_hit_blocks] in self.pending
        return CachedPrefix(blocks, num_hit_blocks * self.block_size, in_flight)

    def can_allocate(
        self,
        request_id: str,
        num_tokens: int,
        *,
        prefix: CachedPrefix | None = None,
        headroom: int = 0,
    ) -> bool:
        """Whether :meth:`allocate_slots` would succeed and leave ``headroom`` blocks over.

        Changes nothing.
        """
        prefix_blocks = prefix.blocks if prefix is not None else ()
        return self.coordinator.can_allocate(
            request_id, num_tokens, prefix_blocks, headroom=headroom
        )

    def allocate_slots(
        self,
        request_id: str,
        num_tokens: int,
        *,
        prefix: CachedPrefix | None = None,
        block_hashes: Sequence[BlockHash] = (),
    ) -> bool:
        """Grow the request's block tables to hold ``num_tokens``, or change nothing at all.

        Args:
            request_id: an unknown one begins to live here.
            num_tokens: in all, computed ones included; a table never shrinks.
            prefix: on the first call, the hit to build on: a fresh answer of
                :meth:`find_cached_prefix`.
            block_hashes: on the first call, the request's hashes from its start. Those after the
                prefix are noted as in flight until the request publishes or frees them.

        Returns:
            False if there are not enough free blocks.

        Raises:
            ValueError: for a prefix given to a request that lives already, one longer than
                ``num_tokens``, or one that is out of date.
        """
        is_new = request_id not in self._request_ids
        if prefix is not None:
            if not is_new:
                raise ValueError(f"request {request_id!r} holds blocks; a prefix comes first")
            self._check_prefix(prefix, num_tokens, block_hashes)
        prefix_blocks = prefix.blocks if prefix is not None else ()
        if not self.coordinator.allocate(request_id, num_tokens, prefix_blocks):
            return False
        if is_new:
            self._request_ids.add(request_id)
            if self._enable_prefix_caching:
                num_hit_tokens = prefix.num_tokens if prefix is not None else 0
                self.pending.add(request_id, block_hashes[num_hit_tokens // self.block_size :])
                self._hit_tokens += num_hit_tokens
                self._queried_tokens += len(block_hashes) * self.block_size
        return True

    def publish(
        self, request_id: str, block_hashes: Sequence[BlockHash], num_computed_tokens: int
    ) -> None:
        """Let the blocks that are full now be found, after the step that computed them.

        Call it when state and output rows of the first ``num_computed_tokens`` tokens are written.

        Args:
            request_id: a request that holds blocks.
            block_hashes: of its full blocks, from its start.
            num_computed_tokens: tokens whose forward pass has run, cached ones included.

        Raises:
            ValueError: if the request holds no blocks.
        """
        self._check_lives(request_id)
        if not self._enable_prefix_caching or request_id in self._outdated_ids:
            return
        self.coordinator.publish(request_id, block_hashes, num_computed_tokens)
        num_full_blocks = num_computed_tokens // self.block_size
        self.pending.remove(request_id, block_hashes[:num_full_blocks])

    def free(self, request_id: str) -> None:
        """Give back all blocks of a request that finished, failed, was aborted or preempted.

        Raises:
            ValueError: if the request holds no blocks.
        """
        self._check_lives(request_id)
        self.coordinator.free(request_id)
        self.pending.drop_request(request_id)
        self._request_ids.remove(request_id)
        self._outdated_ids.discard(request_id)

    def block_ids(self, request_id: str, group_id: int = 0) -> list[int]:
        """The request's block table in a group. ``ValueError`` if it holds no blocks."""
        return self.coordinator.managers[group_id].block_ids(request_id)

    def gather_outputs(
        self,
        request_id: str,
        num_tokens: int,
        start: int = 0,
        names: Collection[str] | None = None,
    ) -> dict[str, Tensor]:
        """Output rows ``[start, num_tokens)`` of a request, cached or computed.

        Returns:
            ``(num_tokens - start, *tail)`` per name; see :meth:`StageOutputCache.gather`.

        Raises:
            ValueError: if the request holds no blocks, or too few of them.
        """
        block_ids = self.block_ids(request_id, self.mirrored_group_id)
        return self.stage_outputs.gather(block_ids, num_tokens, start=start, names=names)

    def reset_prefix_cache(self) -> None:
        """Forget everything computed so far, what running requests compute included.

        For a change that makes old content wrong, such as new weights. Requests that live go on
        with what they hold, but publish nothing more: it builds on the forgotten.
        """
        self.pool.reset()
        self.pending.clear()
        self._outdated_ids |= self._request_ids

    def stats(self) -> KVCacheStats:
        """Where the blocks are, and how many tokens were found."""
        free, cached = len(self.pool.free_queue), len(self.pool.cached_queue)
        return KVCacheStats(
            num_blocks=self.pool.num_blocks,
            free=free,
            held=self.pool.usable_blocks - free - cached,
            cached=cached,
            evictions=self.pool.num_evictions,
            hit_tokens=self._hit_tokens,
            queried_tokens=self._queried_tokens,
        )

    def _check_lives(self, request_id: str) -> None:
        if request_id not in self._request_ids:
            raise ValueError(f"request {request_id!r} holds no blocks")

    def _check_prefix(
        self, prefix: CachedPrefix, num_tokens: int, block_hashes: Sequence[BlockHash]
    ) -> None:
        if prefix.num_tokens > num_tokens:
            raise ValueError(
                f"a prefix of {prefix.num_tokens} tokens does not fit into {num_tokens} tokens"
            )
        expected = block_hashes[: prefix.num_tokens // self.block_size]
        for blocks in prefix.blocks:
            if [block.block_hash for block in blocks] != list(expected):
                raise ValueError(
                    f"the prefix of {prefix.num_tokens} tokens is not (or no longer) cached "
                    f"under the {len(block_hashes)} block hashes given: find it again"
                )


def _first_full_attention_group(config: KVCacheConfig) -> int:
    for group_id, group in enumerate(config.groups):
        if isinstance(group.spec, FullAttentionSpec):
            return group_id
    specs = ", ".join(type(group.spec).__name__ for group in config.groups)
    raise ValueError(f"outputs are mirrored by a full-attention group; there are only: {specs}")
