"""What the scheduler talks to: find a prefix, take blocks, publish what was computed, give back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import Tensor

from prefix_cache.blocks.block import KVCacheBlock
from prefix_cache.blocks.block_hash import BlockHash
from prefix_cache.blocks.block_pool import BlockPool
from prefix_cache.kv_cache.cached_prefix import CachedPrefix, EncoderBlocks
from prefix_cache.kv_cache.kv_cache_stats import KVCacheStats
from prefix_cache.kv_cache.pending_blocks import PendingBlocks
from prefix_cache.layer_types.chunk_stops import ChunkStops
from prefix_cache.layer_types.coordinator import KVCacheCoordinator
from prefix_cache.specs.kv_cache_config import KVCacheConfig
from prefix_cache.specs.kv_cache_spec import FullAttentionSpec, HostOnlySpec
from prefix_cache.stores.stage_output_cache import StageOutputCache

__all__ = ["ENCODER_HIDDEN_STATES", "KVCacheManager"]

ENCODER_HIDDEN_STATES = "encoder_hidden_states"
"""An output with a row per encoder token; kept only where it is asked for by name."""

_NO_LIMIT = 2**40


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
        config: pages and groups; one group must keep all tokens (full attention, or host-only),
            since its blocks are those that outputs are mirrored by.
        enable_prefix_caching: if not, no prefix is ever found and nothing is published; all else
            is the same.
        output_names: mirror these output tensors only; ``None`` mirrors all that are per token.
        max_num_batched_tokens: most tokens of a request that a step runs; None if there is no
            limit.

    Attributes:
        pool: all blocks.
        coordinator: the block tables, per group.
        stage_outputs: output rows by slot of the group ``mirrored_group_id``.
        encoder_outputs: rows of ``encoder_hidden_states`` by slot of the cross-attention group;
            None if there is no such group, or nobody asked for them.
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
        self.pool = BlockPool.for_config(config)
        self.coordinator = KVCacheCoordinator(
            config, self.pool, max_num_batched_tokens or _NO_LIMIT
        )
        self.block_size = self.coordinator.block_size
        self.mirrored_group_id = _first_complete_group(config)
        self.stage_outputs = StageOutputCache(
            config.num_blocks(self.mirrored_group_id),
            self.block_size,
            self.pool.generations(self.mirrored_group_id),
            None if output_names is None else set(output_names) - {ENCODER_HIDDEN_STATES},
        )
        self.encoder_outputs = self._mirror_encoder(output_names)
        self.pending = PendingBlocks()
        self._enable_prefix_caching = enable_prefix_caching
        # Requests that live, and those among them that hold content from before a reset.
        self._request_ids: set[str] = set()
        self._outdated_ids: set[str] = set()
        self.num_resets = 0
        self._stops: dict[str, ChunkStops] = {}
        self._hit_tokens = 0
        self._queried_tokens = 0

    def _mirror_encoder(self, output_names: Collection[str] | None) -> StageOutputCache | None:
        managers = self.coordinator.encoder_managers
        if not managers or ENCODER_HIDDEN_STATES not in (output_names or ()):
            return None
        group_id = managers[0].group_id
        return StageOutputCache(
            self.config.num_blocks(group_id),
            self.block_size,
            self.pool.generations(group_id),
            {ENCODER_HIDDEN_STATES},
        )

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

    def fits(self, num_tokens: int, num_encoder_tokens: int = 0) -> bool:
        """Whether one request of ``num_tokens`` could run to its end if it had the pool alone."""
        return self.pool.fits(self.coordinator.max_blocks(num_tokens, num_encoder_tokens))

    def pages_for(self, num_tokens: int, num_encoder_tokens: int = 0, num_requests: int = 1) -> int:
        """Large pages of the device that requests of ``num_tokens`` each can take up at most."""
        counts = self.coordinator.max_blocks(num_tokens, num_encoder_tokens)
        return self.pool.arenas[0].pages_for({g: n * num_requests for g, n in counts.items()})

    def longest_sequence(self, limit: int) -> int:
        """Tokens of the longest request that :meth:`fits`, at most ``limit``."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle - 1)
        return low

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
        prefix = self._find_token_prefix(block_hashes, num_tokens)
        if encoder is None:
            return prefix
        return self._with_encoder(prefix, encoder)

    def _with_encoder(self, prefix: CachedPrefix, encoder: EncoderBlocks) -> CachedPrefix:
        if not self._enable_prefix_caching:
            return replace(prefix, encoder_cached=False)
        blocks = list(prefix.blocks)
        cached = True
        for manager in self.coordinator.encoder_managers:
            hit = manager.find_longest_cache_hit(encoder.hashes, encoder.num_tokens)
            blocks[manager.group_id] = tuple(hit)
            cached &= len(hit) == len(encoder.hashes)
        if cached and self.encoder_outputs is not None:
            group_id = self.coordinator.encoder_managers[0].group_id
            block_ids = [block.block_id for block in blocks[group_id]]
            cached = self.encoder_outputs.num_valid_rows(block_ids) >= encoder.num_tokens
        if not cached:
            blocks = list(prefix.blocks)
        in_flight = not cached and encoder.hashes[0] in self.pending
        return replace(
            prefix,
            blocks=tuple(blocks),
            in_flight=prefix.in_flight or in_flight,
            encoder_cached=cached,
        )

    def _find_token_prefix(
        self, block_hashes: Sequence[BlockHash], num_tokens: int
    ) -> CachedPrefix:
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
        num_hit_tokens = num_hit_blocks * self.block_size
        stops = self._plan_stops(block_hashes, num_tokens, num_hit_tokens)
        return CachedPrefix(blocks, num_hit_tokens, in_flight, stops)

    def _plan_stops(
        self, block_hashes: Sequence[BlockHash], num_tokens: int, num_hit_tokens: int
    ) -> ChunkStops | None:
        """Where states of this request are worth keeping: none without recurrent layers."""
        if not self.coordinator.state_managers:
            return None
        last = (num_tokens - 1) // self.block_size * self.block_size
        parting = self.coordinator.longest_hit_but_for_states(block_hashes, num_tokens - 1)
        ends = sorted({end for end in (parting, last) if end > num_hit_tokens})
        return ChunkStops(self.block_size, tuple(ends))

    def clip_chunk(self, request_id: str, start: int, num_tokens: int, total: int) -> int:
        """How many of ``num_tokens`` tokens a living request should run; :class:`ChunkStops`."""
        stops = self._stops.get(request_id) if num_tokens > 1 else None
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
        is_new = request_id not in self._request_ids
        if prefix is not None:
            if not is_new:
                raise ValueError(f"request {request_id!r} holds blocks; a prefix comes first")
            self._check_prefix(prefix, num_tokens, block_hashes)
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
            self._request_ids.add(request_id)
            self._note_stops(request_id, prefix.stops if prefix is not None else None)
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
        self._check_lives(request_id)
        if not self._enable_prefix_caching or request_id in self._outdated_ids:
            return
        self.coordinator.publish(request_id, block_hashes, num_computed_tokens)
        num_full_blocks = num_computed_tokens // self.block_size
        self.pending.remove(request_id, block_hashes[:num_full_blocks])

    def publish_encoder(self, request_id: str, encoder: EncoderBlocks) -> None:
        """Let a request's encoder sequence be found, after its keys and values are written.

        Raises:
            ValueError: if the request holds no blocks.
        """
        self._check_lives(request_id)
        if not self._enable_prefix_caching or request_id in self._outdated_ids:
            return
        for manager in self.coordinator.encoder_managers:
            manager.publish(request_id, encoder.hashes, encoder.num_tokens)
        self.pending.remove(request_id, encoder.hashes)

    def free(self, request_id: str) -> None:
        """Give back all blocks of a request that finished, failed, was aborted or preempted.

        Raises:
            ValueError: if the request holds no blocks.
        """
        self._check_lives(request_id)
        self.coordinator.free(request_id)
        self.pending.drop_request(request_id)
        self._request_ids.remove(request_id)
        self._stops.pop(request_id, None)
        self._outdated_ids.discard(request_id)

    def free_cross(self, request_id: str) -> None:
        """Give back a request's cross-attention blocks ahead of its others.

        It can only be freed after that. ``ValueError`` if it holds no blocks.
        """
        self._check_lives(request_id)
        for manager in self.coordinator.encoder_managers:
            manager.empty(request_id)

    def free_all(self) -> None:
        """Give back all blocks of all requests, and forget all content: every page is free then."""
        for request_id in tuple(self._request_ids):
            self.free(request_id)
        self.reset_prefix_cache()

    def stops(self, request_id: str) -> ChunkStops | None:
        """Where a living request's prefill should end its chunks."""
        return self._stops.get(request_id)

    def restore(
        self,
        request_id: str,
        tables: Sequence[Sequence[KVCacheBlock]],
        num_computed_tokens: int,
        block_hashes: Sequence[BlockHash],
        stops: ChunkStops | None,
        *,
        publishes: bool = True,
    ) -> None:
        """Let a request live again with blocks held for it, one table per group.

        Args:
            request_id: one that does not live.
            tables: its blocks, null blocks where it needs none.
            num_computed_tokens: tokens whose content is, or is about to be, in them.
            block_hashes: of its full blocks; those not computed are in flight from now on.
            stops: where its prefill should end its chunks.
            publishes: False for a request that builds on what was forgotten by a reset.

        Raises:
            ValueError: if the request lives.
        """
        for manager, blocks in zip(self.coordinator.managers, tables, strict=True):
            manager.restore(request_id, blocks)
        self._request_ids.add(request_id)
        self._note_stops(request_id, stops)
        if not publishes:
            self._outdated_ids.add(request_id)
        elif self._enable_prefix_caching:
            self.pending.add(request_id, block_hashes[num_computed_tokens // self.block_size :])

    def _note_stops(self, request_id: str, stops: ChunkStops | None) -> None:
        if stops is None:
            return
        self._stops[request_id] = stops
        for manager in self.coordinator.state_managers:
            manager.keep(request_id, stops.ends)

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

    def gather_encoder_outputs(self, request_id: str, num_encoder_tokens: int) -> dict[str, Tensor]:
        """Rows of the request's encoder sequence, ``(num_encoder_tokens, width)``, if wanted."""
        if self.encoder_outputs is None:
            return {}
        group_id = self.coordinator.encoder_managers[0].group_id
        return self.encoder_outputs.gather(self.block_ids(request_id, group_id), num_encoder_tokens)

    @property
    def output_nbytes_by_name(self) -> dict[str, int]:
        """Bytes reserved for output rows, the encoder's included, per mirrored name."""
        encoder = self.encoder_outputs
        own = self.stage_outputs.nbytes_by_name
        return own | (encoder.nbytes_by_name if encoder is not None else {})

    def reset_prefix_cache(self) -> None:
        """Forget everything computed so far, what running requests compute included.

        For a change that makes old content wrong, such as new weights. Requests that live go on
        with what they hold, but publish nothing more: it builds on the forgotten.
        """
        self.pool.reset()
        self.pending.clear()
        self._outdated_ids |= self._request_ids
        self.num_resets += 1

    def is_outdated(self, request_id: str) -> bool:
        """Whether a living request builds on what a reset has forgotten."""
        return request_id in self._outdated_ids

    def stats(self) -> KVCacheStats:
        """Where the blocks are, and how many tokens were found."""
        return KVCacheStats.of_pool(self.pool, self._hit_tokens, self._queried_tokens)

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
        for manager in self.coordinator.managers:
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


def _first_complete_group(config: KVCacheConfig) -> int:
    for group_id, group in enumerate(config.groups):
        if isinstance(group.spec, FullAttentionSpec | HostOnlySpec):
            return group_id
    specs = ", ".join(type(group.spec).__name__ for group in config.groups)
    raise ValueError(
        f"outputs are mirrored by a group that keeps all tokens; there are only: {specs}. "
        "Add a group of HostOnlySpec"
    )
