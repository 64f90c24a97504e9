"""What the scheduler talks to: find a prefix, take blocks, publish what was computed, give back."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import islice

from torch import Tensor

from prefix_cache.blocks.block import KVCacheBlock
from prefix_cache.blocks.block_hash import BlockHash
from prefix_cache.blocks.block_pool import BlockPool
from prefix_cache.kv_cache.cached_prefix import CachedPrefix, EncoderBlocks
from prefix_cache.kv_cache.kv_cache_stats import KVCacheStats
from prefix_cache.kv_cache.mirrored_outputs import MirroredOutputs
from prefix_cache.kv_cache.pending_blocks import PendingBlocks
from prefix_cache.kv_cache.prefix_finder import PrefixFinder
from prefix_cache.layer_types.chunk_stops import ChunkStops
from prefix_cache.layer_types.coordinator import KVCacheCoordinator
from prefix_cache.specs.kv_cache_config import KVCacheConfig

__all__ = ["KVCacheManager"]

_NO_LIMIT = 2**40


class KVCacheManager:
    """Blocks, their content, and the outputs mirrored beside them, for the requests of one engine.

    The life of a request::

        find_cached_prefix ─► allocate_slots(prefix) ─► step ─► write outputs ─► publish ─► free
                                     ▲                                             │
                                     └────────────── allocate_slots ◄──────────────┘

    Publishing comes after the step that computed a block *and* after its output rows are written:
    no request can hit what is still to come. The rows come first:
    ``stage_outputs.write(slot_mapping, tensors)``.

    Args:
        config: pages and groups; one group must keep all tokens (full attention, or host-only),
            since its blocks are those that outputs are mirrored by.
        enable_prefix_caching: whether prefixes are found and published; all else is the same.
        output_names: mirror these output tensors only; ``None`` mirrors all that are per token.
        max_num_batched_tokens: most tokens of a request that a step runs; None: no limit.

    Attributes:
        pool: all blocks.
        coordinator: the block tables, per group.
        outputs: the rows beside the blocks; its ``stage_outputs`` and ``encoder_outputs``, and its
            ``group_id`` as ``mirrored_group_id``, are attributes here too.
        pending: blocks that running requests compute.
        num_resets: how often all content was forgotten.

    Raises:
        ValueError: without a group that keeps all tokens.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        enable_prefix_caching: bool = True,
        output_names: Collection[str] | None = None,
        max_num_batched_tokens: int | None = None,
    ) -> None:
        self.config = config
        self._max_chunk = max_num_batched_tokens or _NO_LIMIT
        self._output_names = output_names
        self._enable_prefix_caching = enable_prefix_caching
        self.num_resets = 0
        self._hit_tokens = 0
        self._queried_tokens = 0
        self.clear()

    def clear(self) -> None:
        """Forget requests, content and rows, in whatever state an interrupted call left them."""
        self.pool = BlockPool.for_config(self.config)
        self.coordinator = KVCacheCoordinator(self.config, self.pool, self._max_chunk)
        self.block_size = self.coordinator.block_size
        self.outputs = MirroredOutputs(self.config, self.coordinator, self._output_names)
        self.mirrored_group_id = self.outputs.group_id
        self.stage_outputs = self.outputs.stage_outputs
        self.encoder_outputs = self.outputs.encoder_outputs
        self.pending = PendingBlocks()
        self._finder = PrefixFinder(self.coordinator, self.outputs, self.pending)
        # Requests that live, each with the number of resets that came before its content.
        self._resets_before: dict[str, int] = {}

    @property
    def enable_prefix_caching(self) -> bool:
        """Whether prefixes are found and published; ``ValueError`` if set while blocks are held."""
        return self._enable_prefix_caching

    @enable_prefix_caching.setter
    def enable_prefix_caching(self, enabled: bool) -> None:
        if self._resets_before:
            raise ValueError(
                f"prefix caching cannot be switched while {len(self._resets_before)} "
                "requests hold blocks"
            )
        self._enable_prefix_caching = enabled

    @property
    def request_ids(self) -> frozenset[str]:
        """Requests that hold blocks."""
        return frozenset(self._resets_before)

    def fits(self, num_tokens: int, num_encoder_tokens: int = 0) -> bool:
        """Whether one request of ``num_tokens`` could run to its end if it had the pool alone."""
        return self.pool.fits(self.coordinator.max_blocks(num_tokens, num_encoder_tokens))

    def pages_for(self, num_tokens: int, num_encoder_tokens: int = 0, num_requests: int = 1) -> int:
        """Large pages of the device that requests of ``num_tokens`` each can take up at most."""
        counts = self.coordinator.max_blocks(num_tokens, num_encoder_tokens)
        return self.pool.arenas[0].pages_for({g: n * num_requests for g, n in counts.items()})

    def longest_sequence(self, limit: int) -> int:
        """Tokens of the longest request that :meth:`fits`, at most ``limit``."""
        return bisect_left(range(limit), True, key=lambda n: not self.fits(n + 1))

    def find_cached_prefix(
        self,
        block_hashes: Sequence[BlockHash],
        num_tokens: int,
        encoder: EncoderBlocks | None = None,
    ) -> CachedPrefix:
        """The longest prefix whose state *and* whose wanted output rows are cached.

        Changes and counts nothing, and takes no reference.

        Args:
            block_hashes: of the sequence's full blocks.
            num_tokens: of the sequence. At least its last token is left to compute, because
                sampling needs that token's logits.
            encoder: the request's encoder sequence; found whole or not at all.
        """
        if not self._enable_prefix_caching:
            return self._finder.nothing("off", encoder_cached=encoder is None)
        return self._finder.find(block_hashes, num_tokens, encoder)

    def clip_chunk(self, request_id: str, start: int, num_tokens: int, total: int) -> int:
        """How many of ``num_tokens`` tokens a living request should run; :class:`ChunkStops`."""
        stops = self.coordinator.stops.get(request_id) if num_tokens > 1 else None
        return num_tokens if stops is None else stops.clip(start, num_tokens, total)

    def can_finish(
        self,
        num_tokens: int,
        *,
        prefix: CachedPrefix | None = None,
        num_encoder_tokens: int = 0,
        headroom: int = 0,
    ) -> bool:
        """Whether a new request could grow to ``num_tokens`` and leave ``headroom`` blocks over.

        Changes nothing.
        """
        prefix_blocks = prefix.blocks if prefix is not None else ()
        return self.coordinator.can_finish(
            num_tokens, prefix_blocks, num_encoder_tokens=num_encoder_tokens, headroom=headroom
        )

    def allocate_slots(
        self,
        request_id: str,
        num_tokens: int,
        *,
        num_computed_tokens: int = 0,
        encoder: EncoderBlocks | None = None,
        prefix: CachedPrefix | None = None,
        block_hashes: Sequence[BlockHash] = (),
    ) -> bool:
        """Grow the request's block tables to hold ``num_tokens``, or take nothing at all.

        Args:
            request_id: an unknown one begins to live here.
            num_tokens: in all, computed ones included; a table never shrinks.
            num_computed_tokens: blocks that only tokens before these can see are given back.
            encoder: the request's encoder sequence, if it has one; the same in every call.
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
        is_new = request_id not in self._resets_before
        if prefix is not None:
            if not is_new:
                raise ValueError(f"request {request_id!r} holds blocks; a prefix comes first")
            self._finder.check(prefix, num_tokens, block_hashes)
        prefix_blocks = prefix.blocks if prefix is not None else ()
        if not self.coordinator.allocate(
            request_id,
            num_tokens,
            prefix_blocks,
            num_computed_tokens=num_computed_tokens,
            num_encoder_tokens=encoder.num_tokens if encoder is not None else 0,
        ):
            return False
        if is_new:
            self._resets_before[request_id] = self.num_resets
            self.coordinator.keep_stops(request_id, prefix.stops if prefix is not None else None)
            if self._enable_prefix_caching:
                num_hit_tokens = prefix.num_tokens if prefix is not None else 0
                self.pending.add(request_id, block_hashes[num_hit_tokens // self.block_size :])
                if encoder is not None and not (prefix is not None and prefix.encoder_cached):
                    self.pending.add(request_id, encoder.hashes)
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
        is_current = self.resets_before(request_id) == self.num_resets
        if not (is_current and self._enable_prefix_caching):
            return
        self.coordinator.publish(request_id, block_hashes, num_computed_tokens)
        num_full_blocks = num_computed_tokens // self.block_size
        self.pending.remove(request_id, islice(block_hashes, num_full_blocks))

    def publish_encoder(self, request_id: str, encoder: EncoderBlocks) -> None:
        """Let a request's encoder sequence be found, after its keys and values are written."""
        is_current = self.resets_before(request_id) == self.num_resets
        if not (is_current and self._enable_prefix_caching):
            return
        for manager in self.coordinator.encoder_managers:
            manager.publish(request_id, encoder.hashes, encoder.num_tokens)
        self.pending.remove(request_id, encoder.hashes)

    def free(self, request_id: str) -> None:
        """Give back all blocks of a request that finished, failed, was aborted or preempted.

        Raises:
            ValueError: if the request holds no blocks.
        """
        self.coordinator.free(request_id)
        self.pending.drop_request(request_id)
        del self._resets_before[request_id]

    def restore(
        self,
        request_id: str,
        tables: Sequence[Sequence[KVCacheBlock]],
        num_computed_tokens: int,
        block_hashes: Sequence[BlockHash],
        stops: ChunkStops | None,
        *,
        resets_before: int,
    ) -> None:
        """Let a request live again with blocks held for it, one table per group.

        Args:
            request_id: one that does not live.
            tables: its blocks, null blocks where it needs none.
            num_computed_tokens: tokens whose content is, or is about to be, in them.
            block_hashes: of its full blocks; those not computed are in flight from now on.
            stops: where its prefill should end its chunks.
            resets_before: see :meth:`resets_before`, of when it lived last.

        Raises:
            ValueError: if the request lives.
        """
        for manager, blocks in zip(self.coordinator.managers, tables, strict=True):
            manager.restore(request_id, blocks)
        self._resets_before[request_id] = resets_before
        self.coordinator.keep_stops(request_id, stops)
        if self._enable_prefix_caching and resets_before == self.num_resets:
            self.pending.add(request_id, block_hashes[num_computed_tokens // self.block_size :])

    def block_ids(self, request_id: str, group_id: int = 0, first: int = 0) -> list[int]:
        """A request's block table in a group, from a block on. ``ValueError`` if it has none."""
        return self.coordinator.managers[group_id].block_ids(request_id, first)

    def gather_outputs(
        self, request_id: str, num_tokens: int, start: int = 0, names: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """Output rows ``[start, num_tokens)`` of a request; see :meth:`MirroredOutputs.gather`."""
        return self.outputs.gather(request_id, num_tokens, start, names)

    def gather_encoder_outputs(self, request_id: str, num_encoder_tokens: int) -> dict[str, Tensor]:
        """Rows of the request's encoder sequence, ``(num_encoder_tokens, width)``, if wanted."""
        return self.outputs.gather_encoder(request_id, num_encoder_tokens)

    def reset_prefix_cache(self) -> None:
        """Forget everything computed so far, what running requests compute included.

        For a change that makes old content wrong, such as new weights. Requests that live go on
        with what they hold, but publish nothing more: it builds on the forgotten.
        """
        self.pool.reset()
        self.pending.clear()
        self.num_resets += 1

    def resets_before(self, request_id: str) -> int:
        """How many resets came before what a request holds. ``ValueError`` if it holds no blocks.

        Fewer than ``num_resets``: it builds on what was forgotten.
        """
        if request_id not in self._resets_before:
            raise ValueError(f"request {request_id!r} holds no blocks")
        return self._resets_before[request_id]

    def stats(self) -> KVCacheStats:
        """Where the blocks are, and how many tokens were found."""
        found = KVCacheStats.of_pool(self.pool, self._hit_tokens, self._queried_tokens)
        return found.in_groups(self.pool, self.config, self.outputs.nbytes)
