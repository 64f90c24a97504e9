"""The scheduler's interface to the cache: find prefixes; allocate, publish and free blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeAlias

import torch
from torch import Tensor

from prefix_cache.blocks.block import BlockHash, KVCacheBlock, whole_input_block_hashes
from prefix_cache.blocks.block_pool import BlockPool
from prefix_cache.kv_cache.kv_cache_stats import KVCacheStats, PrefixMiss
from prefix_cache.kv_cache.partial_blocks import PartialBlocks, PartialHash, PartialHit
from prefix_cache.layer_types.coordinator import ChunkStops, KVCacheCoordinator
from prefix_cache.specs.kv_cache_spec import (
    FullAttentionSpec,
    HostOnlySpec,
    KVCacheConfig,
)
from prefix_cache.stores.paged_memory import PageCopy, PagedMemory
from prefix_cache.stores.stage_output_cache import StageOutputCache
from prefix_cache.stores.whole_input_cache import WholeInputCache

ENCODER_HIDDEN_STATES = "encoder_hidden_states"
"""Name of an output with one row per encoder token; stored only if it is requested by name."""


SavedRows: TypeAlias = Mapping[int, Mapping[str, Tensor]]
"""Copies of one request's rows, by the group that mirrors them and by name."""


class MirroredOutputs:
    """Per-token outputs of a model, stored by the slots of the requests' block tables.

    Args:
        config: the groups; one must keep all tokens (full attention or host-only), because outputs
            are mirrored by its blocks.
        names: mirror these tensors only; ``None`` mirrors all that are per token.

    Attributes:
        group_id: group whose slots index the rows of ``stage_outputs``.
        by_group: all rows, by the group whose slots index them.
        encoder_outputs: rows of ``encoder_hidden_states`` by slot of the cross-attention group;
            None if there is no such group, or the name is not requested.

    Raises:
        ValueError: without a group that keeps all tokens.
    """

    def __init__(
        self, config: KVCacheConfig, coordinator: KVCacheCoordinator, names: Collection[str] | None
    ) -> None:
        self._coordinator = coordinator
        self.group_id = _first_complete_group(config)
        of_tokens = None if names is None else set(names) - {ENCODER_HIDDEN_STATES}
        wanted: dict[int, Collection[str] | None] = {self.group_id: of_tokens}
        self._encoder_group_id = -1
        if coordinator.encoder_managers and ENCODER_HIDDEN_STATES in (names or ()):
            self._encoder_group_id = coordinator.encoder_managers[0].group_id
            wanted[self._encoder_group_id] = {ENCODER_HIDDEN_STATES}
        self.by_group = {
            group_id: StageOutputCache(
                config.num_blocks(group_id),
                coordinator.block_size,
                coordinator.pool.generations(group_id),
                of_group,
            )
            for group_id, of_group in wanted.items()
        }
        self.stage_outputs = self.by_group[self.group_id]
        self.encoder_outputs = self.by_group.get(self._encoder_group_id)

    @property
    def nbytes_by_name(self) -> dict[str, int]:
        """Bytes reserved for rows, including the encoder's, per mirrored name."""
        found = [cache.nbytes_by_name for cache in self.by_group.values()]
        return {name: nbytes for each in found for name, nbytes in each.items()}

    @property
    def nbytes(self) -> int:
        """Bytes reserved for all names."""
        return sum(self.nbytes_by_name.values())

    def num_valid_blocks(self, hit: Sequence[Sequence[KVCacheBlock]]) -> int:
        """Return the number of leading blocks of a hit whose wanted rows are all valid."""
        return self.stage_outputs.num_valid_blocks([block.block_id for block in hit[self.group_id]])

    def has_encoder_rows(self, hit: Sequence[Sequence[KVCacheBlock]], num_tokens: int) -> bool:
        """Return True if all ``num_tokens`` encoder rows are valid, or none are wanted."""
        if self.encoder_outputs is None:
            return True
        block_ids = [block.block_id for block in hit[self._encoder_group_id]]
        return self.encoder_outputs.num_valid_rows(block_ids) >= num_tokens

    def blocks_found(self, block_hashes: Set[BlockHash]) -> set[BlockHash]:
        """Return the hashes that are cached in the mirrored group, which keeps all tokens.

        No cached prefix includes a block of any other hash.
        """
        return block_hashes & self._coordinator.pool.hash_tables[self.group_id].keys()

    def num_blocks_found(self, block_hashes: Sequence[BlockHash]) -> int:
        """Return the number of leading blocks that are cached in the mirrored group."""
        found = self._coordinator.pool.hash_tables[self.group_id]
        return next(
            (i for i, key in enumerate(block_hashes) if key not in found), len(block_hashes)
        )

    def gather(
        self, request_id: str, num_tokens: int, start: int = 0, names: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """Return rows ``[start, num_tokens)`` of a request, cached or computed."""
        manager, size = self._coordinator.managers[self.group_id], self.stage_outputs.block_size
        num_held = len(manager.table(request_id)) * size
        if not 0 <= start <= num_tokens <= num_held:
            raise ValueError(
                f"rows [{start}, {num_tokens}) were asked for; request {request_id!r} holds blocks "
                f"of {num_held} tokens"
            )
        first = start // size
        block_ids = manager.block_ids(request_id, first, -(-num_tokens // size))
        return self.stage_outputs.gather(
            block_ids, num_tokens - first * size, start=start - first * size, names=names
        )

    def gather_encoder(self, request_id: str, num_tokens: int) -> dict[str, Tensor]:
        """Return the rows of the request's encoder sequence, ``(num_tokens, width)``, if wanted."""
        if self.encoder_outputs is None:
            return {}
        block_ids = self._block_ids(request_id, self._encoder_group_id)
        return self.encoder_outputs.gather(block_ids, num_tokens)

    def save(self, request_id: str, num_tokens: int) -> SavedRows:
        """Copy the rows of a request's first tokens, and the valid rows of its encoder."""
        saved = {self.group_id: self.gather(request_id, num_tokens)}
        if self.encoder_outputs is not None:
            block_ids = self._block_ids(request_id, self._encoder_group_id)
            num_rows = self.encoder_outputs.num_valid_rows(block_ids)
            saved[self._encoder_group_id] = self.gather_encoder(request_id, num_rows)
        return saved

    def restore(self, request_id: str, saved: SavedRows) -> None:
        """Write saved rows to the blocks that the request holds now."""
        for group_id, tensors in saved.items():
            cache = self.by_group[group_id]
            blocks = torch.tensor(self._block_ids(request_id, group_id), dtype=torch.int64)
            num_rows = len(next(iter(tensors.values()), ()))
            cache.write(cache.slots(blocks)[:num_rows], tensors)

    def _block_ids(self, request_id: str, group_id: int) -> list[int]:
        return self._coordinator.managers[group_id].block_ids(request_id)


def _first_complete_group(config: KVCacheConfig) -> int:
    for group_id, group in enumerate(config.groups):
        if isinstance(group.spec, FullAttentionSpec | HostOnlySpec):
            return group_id
    specs = ", ".join(type(group.spec).__name__ for group in config.groups)
    raise ValueError(
        f"outputs are mirrored by a group that keeps all tokens; there are only: {specs}. "
        "Add a group of HostOnlySpec"
    )


@dataclass(frozen=True, slots=True)
class EncoderBlocks:
    """Encoder sequence of a request, as cross-attention stores it.

    Attributes:
        num_tokens: length of the encoder's output.
        hashes: one hash per block, including a partial last one.
    """

    num_tokens: int
    hashes: tuple[BlockHash, ...]

    @classmethod
    def of(cls, content_hash: BlockHash, num_tokens: int, block_size: int) -> EncoderBlocks:
        """Create the blocks of an encoder input whose output has ``num_tokens`` rows."""
        hashes = whole_input_block_hashes(content_hash, num_tokens, block_size)
        return cls(num_tokens, tuple(hashes))


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Cached prefix of a prompt. Holds no reference: valid until the next change.

    Attributes:
        blocks: per group, the blocks of the prefix; in cross-attention all encoder blocks or none.
        num_tokens: length of the prefix, shorter than the prompt: whole blocks, and the tokens of
            ``partial``.
        in_flight: true if a running request is computing the next or the encoder's block: wait.
        stops: chunk ends of the rest of the prefill.
        encoder_cached: true if everything wanted of the encoder sequence, if any, is cached.
        miss: the reason why it is not longer; None if these tokens are hit as far as possible.
        lacking_group: group whose blocks ended the prefix, if ``miss`` is ``group``.
        num_seen_tokens: tokens shared with prompts that are, or recently were, cached.
        partial: the block in which the prefix ends, to be copied; None: it ends with a block.
    """

    blocks: tuple[tuple[KVCacheBlock, ...], ...]
    num_tokens: int
    in_flight: bool
    stops: ChunkStops | None = None
    encoder_cached: bool = True
    miss: PrefixMiss | None = field(default=None, compare=False)
    lacking_group: int | None = field(default=None, compare=False)
    num_seen_tokens: int = field(default=0, compare=False)
    partial: PartialHit | None = None

    @property
    def sources(self) -> Mapping[int, KVCacheBlock]:
        """Block to copy, per group."""
        return self.partial.sources if self.partial is not None else {}


class PendingBlocks:
    """Hashes of blocks that requests are computing.

    A request that needs such a block should wait a step instead of computing it again.

    Attributes:
        counts: hash to the number of requests that compute it, never 0; read-only.
        hashes: request id to the hashes that it computes, in order; read-only.
    """

    def __init__(self) -> None:
        self.counts: dict[BlockHash, int] = {}
        self.hashes: dict[str, dict[BlockHash, None]] = {}

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self.counts

    def add(self, request_id: str, block_hashes: Iterable[BlockHash]) -> None:
        """Record that a request computes these blocks."""
        hashes, counts = self.hashes.setdefault(request_id, {}), self.counts
        for block_hash in block_hashes:
            if block_hash not in hashes:
                hashes[block_hash] = None
                counts[block_hash] = counts.get(block_hash, 0) + 1

    def remove(self, request_id: str, block_hashes: Iterable[BlockHash]) -> None:
        """Record that a request has computed these blocks; unknown ones are ignored."""
        hashes, counts = self.hashes.get(request_id), self.counts
        if not hashes:
            return
        for block_hash in block_hashes:
            if block_hash in hashes:
                del hashes[block_hash]
                counts[block_hash] -= 1
                if not counts[block_hash]:
                    del counts[block_hash]

    def drop_request(self, request_id: str) -> None:
        """Record that a request will compute nothing more."""
        self.remove(request_id, tuple(self.hashes.get(request_id, ())))
        self.hashes.pop(request_id, None)

    def clear(self) -> None:
        """Forget everything."""
        self.counts.clear()
        self.hashes.clear()


class PrefixFinder:
    """Search for cached prefixes; changes and counts nothing, and adds no reference.

    Args:
        outputs: the mirrored rows; a hit is shortened to where all wanted rows are valid.
    """

    def __init__(
        self,
        coordinator: KVCacheCoordinator,
        outputs: MirroredOutputs,
        pending: PendingBlocks,
        partial_blocks: PartialBlocks,
    ) -> None:
        self._coordinator = coordinator
        self._partial_blocks = partial_blocks
        self._outputs = outputs
        self._pending = pending
        self._block_size = coordinator.block_size

    def nothing(self, miss: PrefixMiss, *, encoder_cached: bool) -> CachedPrefix:
        """Return an empty prefix."""
        blocks = ((),) * len(self._coordinator.managers)
        return CachedPrefix(blocks, 0, in_flight=False, encoder_cached=encoder_cached, miss=miss)

    def find(
        self,
        block_hashes: Sequence[BlockHash],
        num_tokens: int,
        encoder: EncoderBlocks | None,
        partial_hash: PartialHash | None,
    ) -> CachedPrefix:
        """See :meth:`KVCacheManager.find_cached_prefix`."""
        prefix = self._find_tokens(block_hashes, num_tokens)
        if partial_hash is not None and not prefix.in_flight:
            prefix = self._with_partial(prefix, block_hashes, num_tokens, partial_hash)
        return prefix if encoder is None else self._with_encoder(prefix, encoder)

    def check(
        self, prefix: CachedPrefix, num_tokens: int, block_hashes: Sequence[BlockHash]
    ) -> None:
        """Raise ``ValueError`` unless a prefix fits these tokens and is still cached."""
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
            current = all([b.large_page is None or b.block_hash == h for b, h in pairs])
            current = current and (prefix.partial is None or prefix.partial.is_current)
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
            # Search again instead of truncating: other groups may have no hit of this length.
            blocks = self._coordinator.find_longest_cache_hit(
                block_hashes, num_valid * self._block_size
            )
        num_hit_blocks = len(blocks[self._outputs.group_id])
        end = min(max_num_tokens // self._block_size, len(block_hashes))
        in_flight = num_hit_blocks < end and block_hashes[num_hit_blocks] in self._pending
        num_hit_tokens = num_hit_blocks * self._block_size
        num_seen_tokens = self._num_seen(block_hashes, num_hit_blocks, end) * self._block_size
        stops = self._plan_stops(num_tokens, num_hit_tokens, num_seen_tokens)
        miss = self._miss(block_hashes, num_hit_blocks, end, lacks_rows=lacks_rows)
        lacking = None
        if miss == "group":
            lacking = self._coordinator.lacking_group(block_hashes[: num_hit_blocks + 1])
        return CachedPrefix(
            blocks,
            num_hit_tokens,
            in_flight,
            stops,
            miss=miss,
            lacking_group=lacking,
            num_seen_tokens=num_seen_tokens,
        )

    def _miss(
        self, block_hashes: Sequence[BlockHash], num_hit_blocks: int, end: int, *, lacks_rows: bool
    ) -> PrefixMiss | None:
        """Return why a hit is ``num_hit_blocks`` long; ``end`` is the maximum length in blocks."""
        pool = self._coordinator.pool
        following = block_hashes[num_hit_blocks : num_hit_blocks + 1]
        is_cached = self._outputs.num_blocks_found(following) > 0
        if num_hit_blocks == end:
            return "last_token" if is_cached else "short" if end == 0 else None
        if is_cached:
            return "rows" if lacks_rows else "group"
        return "evicted" if pool.was_evicted(self._outputs.group_id, following[0]) else "unseen"

    def _with_partial(
        self,
        prefix: CachedPrefix,
        block_hashes: Sequence[BlockHash],
        num_tokens: int,
        partial_hash: PartialHash,
    ) -> CachedPrefix:
        """Return the prefix, or a longer one that ends inside a block."""
        hit = self._partial_blocks.find(block_hashes, prefix.num_tokens, num_tokens, partial_hash)
        if hit is None:
            return prefix
        num_hit_blocks = hit.num_tokens // self._block_size
        end = min((num_tokens - 1) // self._block_size, len(block_hashes))
        is_all = hit.num_tokens == num_tokens - 1
        return replace(
            prefix,
            blocks=hit.blocks,
            num_tokens=hit.num_tokens,
            in_flight=num_hit_blocks < end and block_hashes[num_hit_blocks] in self._pending,
            stops=self._plan_stops(num_tokens, hit.num_tokens, prefix.num_seen_tokens),
            miss=None
            if is_all
            else self._miss(block_hashes, num_hit_blocks, end, lacks_rows=False),
            lacking_group=None,
            partial=hit,
        )

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

    def _num_seen(self, block_hashes: Sequence[BlockHash], first: int, end: int) -> int:
        """Return how many leading blocks are cached or remembered as evicted, at least ``first``.

        An earlier request shared these with this one, so others may too.
        """
        pool, group_id = self._coordinator.pool, self._outputs.group_id
        found = pool.hash_tables[group_id]
        return next(
            (
                index
                for index in range(first, end)
                if block_hashes[index] not in found
                and not pool.was_evicted(group_id, block_hashes[index])
            ),
            end,
        )

    def _plan_stops(
        self, num_tokens: int, num_hit_tokens: int, num_seen_tokens: int
    ) -> ChunkStops | None:
        """Return the chunk ends at which to keep states; None without recurrent layers."""
        if not self._coordinator.state_managers:
            return None
        last = (num_tokens - 1) // self._block_size * self._block_size
        ends = sorted({end for end in (num_seen_tokens, last) if end > num_hit_tokens})
        return ChunkStops(self._block_size, tuple(ends))


_NO_LIMIT = 2**40


class KVCacheManager:
    """Manager of blocks, their content and the mirrored outputs, for the requests of one engine.

    Life cycle of a request::

        find_cached_prefix ─► allocate_slots(prefix) ─► step ─► write outputs ─► publish ─► free
                                     ▲                                             │
                                     └────────────── allocate_slots ◄──────────────┘

    Publish a block after the step that computed it *and* after its output rows are written with
    ``stage_outputs.write(slot_mapping, tensors)``, so that no request can hit missing rows.

    Args:
        config: pages and groups; one group must keep all tokens (full attention or host-only),
            because outputs are mirrored by its blocks.
        enable_prefix_caching: if true, prefixes are found and published; all else is the same.
        output_names: mirror these output tensors only; ``None`` mirrors all that are per token.
        max_num_batched_tokens: maximum number of tokens of a request per step; None: no limit.
        memory: pages in which partial blocks are copied; None if no model runs.

    Attributes:
        pool: all blocks.
        outputs: mirrored output rows; its ``stage_outputs`` and ``encoder_outputs``, and its
            ``group_id`` as ``mirrored_group_id``, are attributes of the manager too.
        pending: blocks that running requests compute.
        item_rows: pages of tower rows in the pool; None for a model without towers.
        num_resets: how often all content was forgotten.
        misses: how often a prefix hit ended early, by reason.
        group_misses: misses of reason ``group``, by the group that lacked blocks.

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
        memory: PagedMemory | None = None,
    ) -> None:
        self.config = config
        self._memory = memory
        self._max_chunk = max_num_batched_tokens or _NO_LIMIT
        self._output_names = output_names
        self._enable_prefix_caching = enable_prefix_caching
        self.num_resets = 0
        self._hit_tokens = 0
        self._queried_tokens = 0
        self.misses: Counter[str] = Counter()
        self.group_misses: Counter[int] = Counter()
        self.clear()

    def clear(self) -> None:
        """Forget requests, content and rows, even if an interrupted call left them inconsistent."""
        self.pool = BlockPool.for_config(self.config)
        self.coordinator = KVCacheCoordinator(self.config, self.pool, self._max_chunk)
        self.block_size = self.coordinator.block_size
        self.outputs = MirroredOutputs(self.config, self.coordinator, self._output_names)
        self.mirrored_group_id = self.outputs.group_id
        self.stage_outputs = self.outputs.stage_outputs
        self.encoder_outputs = self.outputs.encoder_outputs
        self.pending = PendingBlocks()
        self.item_rows: WholeInputCache | None = None
        if page_bytes := self.config.item_page_bytes:
            group_id, max_pages = self.config.item_group_id, self.config.max_item_pages
            self.item_rows = WholeInputCache(self.pool, None, page_bytes, group_id, max_pages)
        self._partial_blocks = PartialBlocks(
            self.coordinator, self.stage_outputs, self.mirrored_group_id
        )
        self._finder = PrefixFinder(
            self.coordinator, self.outputs, self.pending, self._partial_blocks
        )
        # Live requests, each with the number of resets before its content was computed.
        self._resets_before: dict[str, int] = {}

    @property
    def enable_prefix_caching(self) -> bool:
        """True if prefixes are found and published. ``ValueError`` if set while blocks are held."""
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
        """Return True if a request of ``num_tokens`` could finish with the whole pool to itself."""
        return self.pool.fits(self.coordinator.max_blocks(num_tokens, num_encoder_tokens))

    def pages_for(
        self,
        num_tokens: int,
        num_encoder_tokens: int = 0,
        num_requests: int = 1,
        num_item_pages: int = 0,
    ) -> int:
        """Return the maximum number of device pages that requests of ``num_tokens`` each occupy.

        One of them is computing an item that has ``num_item_pages``.
        """
        counts = self.coordinator.max_blocks(num_tokens, num_encoder_tokens)
        counts = {g: n * num_requests for g, n in counts.items()}
        counts[self.config.item_group_id] = num_item_pages
        return self.pool.arenas[0].pages_for(counts)

    def longest_sequence(self, limit: int) -> int:
        """Return the length of the longest request that :meth:`fits`, at most ``limit``."""
        return bisect_left(range(limit), True, key=lambda n: not self.fits(n + 1))

    def find_cached_prefix(
        self,
        block_hashes: Sequence[BlockHash],
        num_tokens: int,
        encoder: EncoderBlocks | None = None,
        partial_hash: PartialHash | None = None,
    ) -> CachedPrefix:
        """Find the longest prefix whose state *and* whose wanted output rows are cached.

        Changes and counts nothing, and adds no reference.

        Args:
            num_tokens: length of the sequence. At least its last token is left to compute, because
                sampling needs that token's logits.
            encoder: the request's encoder sequence; found whole or not at all.
            partial_hash: partial hashes of the sequence; None finds whole blocks only.
        """
        if not self._enable_prefix_caching:
            return self._finder.nothing("off", encoder_cached=encoder is None)
        return self._finder.find(block_hashes, num_tokens, encoder, partial_hash)

    def clip_chunk(self, request_id: str, start: int, num_tokens: int, total: int) -> int:
        """Return how many of ``num_tokens`` tokens to run now; see :class:`ChunkStops`."""
        stops = self.coordinator.stops.get(request_id) if num_tokens > 1 else None
        return num_tokens if stops is None else stops.clip(start, num_tokens, total)

    def can_finish(
        self,
        num_tokens: int,
        *,
        prefix: CachedPrefix | None = None,
        num_encoder_tokens: int = 0,
        headroom: int = 0,
        num_item_pages: int = 0,
    ) -> bool:
        """Return True if a new request could grow to ``num_tokens`` if no other allocated a block.

        Changes nothing.

        Args:
            headroom: blocks that must remain free in every group that grows.
            num_item_pages: pages of the largest item of the request, which holds one at a time.
        """
        config, blocks = self.config, prefix.blocks if prefix is not None else ()
        needs = {config.item_group_id: num_item_pages} if num_item_pages else {}
        for manager in self.coordinator.managers:
            num_prefix = len(blocks[manager.group_id]) if blocks else 0
            if manager.follows_tokens:
                needs[manager.group_id] = headroom + manager.num_blocks_to_finish(
                    num_tokens, num_prefix * self.block_size
                )
            else:
                needs[manager.group_id] = manager.max_blocks(num_encoder_tokens) - num_prefix
        sources = prefix.sources.values() if prefix is not None else ()
        return self.pool.can_allocate(needs, (*blocks, tuple(sources)))

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
        """Grow the request's block tables to ``num_tokens``, or allocate nothing and return False.

        The partial block of a prefix is copied immediately, with its rows, so the swap copies of
        released pages must not still be pending.

        Args:
            request_id: an unknown id starts a new request.
            num_tokens: total number of tokens, including computed ones; a table never shrinks.
            num_computed_tokens: blocks that only tokens before these need are released.
            encoder: the request's encoder sequence, if it has one; the same in every call.
            prefix: on the first call, the hit to build on: a fresh result of
                :meth:`find_cached_prefix`.
            block_hashes: on the first call, the request's hashes from its start. Those after the
                prefix are recorded as in flight until the request publishes or frees them.

        Raises:
            ValueError: for a prefix of a request that already holds blocks, one longer than
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
            sources=prefix.sources if prefix is not None else {},
            num_computed_tokens=num_computed_tokens,
            num_encoder_tokens=encoder.num_tokens if encoder is not None else 0,
        ):
            return False
        if prefix is not None and prefix.partial is not None:
            self._copy(request_id, prefix.partial)
        if is_new:
            self._resets_before[request_id] = self.num_resets
            self.coordinator.keep_stops(request_id, prefix.stops if prefix is not None else None)
            if self._enable_prefix_caching:
                self._record_prefix(request_id, prefix, block_hashes, encoder)
        return True

    def _record_prefix(
        self,
        request_id: str,
        prefix: CachedPrefix | None,
        block_hashes: Sequence[BlockHash],
        encoder: EncoderBlocks | None,
    ) -> None:
        """Record the prefix hit of a new request, and the blocks that it computes now."""
        num_hit_tokens = prefix.num_tokens if prefix is not None else 0
        if prefix is not None and prefix.num_seen_tokens > num_hit_tokens:
            self.coordinator.record_divergence(
                request_id, block_hashes, num_hit_tokens, prefix.num_seen_tokens
            )
        self.pending.add(request_id, block_hashes[num_hit_tokens // self.block_size :])
        if encoder is not None and not (prefix is not None and prefix.encoder_cached):
            self.pending.add(request_id, encoder.hashes)
        self._hit_tokens += num_hit_tokens
        self._queried_tokens += max(len(block_hashes) * self.block_size, num_hit_tokens)

    def _copy(self, request_id: str, hit: PartialHit) -> None:
        """Copy a partial block that was found to the block after the request's full ones."""
        num_full, num_rest = divmod(hit.num_tokens, self.block_size)
        for group_id, source in hit.sources.items():
            (target,) = self.block_ids(request_id, group_id, num_full)[:1]
            if self._memory is not None and self.config.groups[group_id].on_device:
                copy = PageCopy(group_id, (source.block_id,), (target,))
                self._memory.copy_pages(copy, self._memory)
            if group_id == self.mirrored_group_id:
                rows = self.stage_outputs.gather([source.block_id], num_rest)
                slots = self.stage_outputs.slots(torch.tensor([target]))[:num_rest]
                self.stage_outputs.write(slots, rows)

    def publish(
        self, request_id: str, block_hashes: Sequence[BlockHash], num_computed_tokens: int
    ) -> None:
        """Make the blocks that are full now findable, after the step that computed them.

        Call it when state and output rows of the first ``num_computed_tokens`` tokens are written.

        Args:
            block_hashes: hashes of the request's full blocks, from its start.
            num_computed_tokens: tokens whose forward pass has run, including cached ones.

        Raises:
            ValueError: if the request holds no blocks.
        """
        if self._can_publish(request_id):
            self.coordinator.publish(request_id, block_hashes, num_computed_tokens)
            num_full_blocks = num_computed_tokens // self.block_size
            self.pending.remove(request_id, islice(block_hashes, num_full_blocks))

    def publish_partial(
        self,
        request_id: str,
        block_hashes: Sequence[BlockHash],
        partial_hash: PartialHash,
        num_computed_tokens: int,
    ) -> None:
        """Make the partial last block of a finished request findable, before it is freed.

        Arguments are as for :meth:`publish`, which must be called first.
        """
        block_hash = partial_hash(num_computed_tokens) if self._can_publish(request_id) else None
        if block_hash is not None:
            self._partial_blocks.publish(request_id, block_hashes, block_hash, num_computed_tokens)

    def publish_encoder(self, request_id: str, encoder: EncoderBlocks) -> None:
        """Make a request's encoder sequence findable, after its keys and values are written."""
        if not self._can_publish(request_id):
            return
        for manager in self.coordinator.encoder_managers:
            manager.publish(request_id, encoder.hashes, encoder.num_tokens)
        self.pending.remove(request_id, encoder.hashes)

    def _can_publish(self, request_id: str) -> bool:
        return self.resets_before(request_id) == self.num_resets and self._enable_prefix_caching

    def free(self, request_id: str) -> None:
        """Release all blocks of a request that finished, failed, was aborted or preempted.

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
        """Resume a request with blocks held for it, one table per group.

        Args:
            request_id: a request that holds no blocks here.
            tables: its blocks, with null blocks where it needs none.
            num_computed_tokens: tokens whose content is, or is about to be, in the blocks.
            block_hashes: hashes of its full blocks; those not computed are in flight from now on.
            stops: chunk ends of its prefill.
            resets_before: result of :meth:`resets_before` when the request was last live.

        Raises:
            ValueError: if the request already holds blocks.
        """
        for manager, blocks in zip(self.coordinator.managers, tables, strict=True):
            manager.restore(request_id, blocks)
        self._resets_before[request_id] = resets_before
        self.coordinator.keep_stops(request_id, stops)
        if self._enable_prefix_caching and resets_before == self.num_resets:
            self.pending.add(request_id, block_hashes[num_computed_tokens // self.block_size :])

    def block_ids(self, request_id: str, group_id: int = 0, first: int = 0) -> list[int]:
        """Return a request's block table in a group from ``first`` on. ``ValueError`` if none."""
        return self.coordinator.managers[group_id].block_ids(request_id, first)

    def gather_outputs(
        self, request_id: str, num_tokens: int, start: int = 0, names: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """Return output rows ``[start, num_tokens)``; see :meth:`MirroredOutputs.gather`."""
        return self.outputs.gather(request_id, num_tokens, start, names)

    def reset_prefix_cache(self) -> None:
        """Forget all computed content, including blocks that running requests are computing.

        For a change that invalidates old content, such as new weights. Live requests continue with
        the blocks they hold, but publish nothing more, because it depends on forgotten content.
        """
        self.pool.reset()
        self.pending.clear()
        self.num_resets += 1

    def resets_before(self, request_id: str) -> int:
        """Return the number of resets before a request's content. ``ValueError`` if none is held.

        If it is less than ``num_resets``, the content depends on forgotten content.
        """
        if request_id not in self._resets_before:
            raise ValueError(f"request {request_id!r} holds no blocks")
        return self._resets_before[request_id]

    def stats(self) -> KVCacheStats:
        """Return counts of blocks by state, hit tokens and misses."""
        found = KVCacheStats.of_pool(self.pool, self._hit_tokens, self._queried_tokens)
        found = replace(found, misses=dict(self.misses))
        return found.in_groups(self.pool, self.config, self.outputs.nbytes, self.group_misses)

    def count_miss(self, miss: PrefixMiss, lacking_group: int | None) -> None:
        """Count the reason why the prefix hit of an admitted request was not longer."""
        self.misses[miss] += 1
        if lacking_group is not None:
            self.group_misses[lacking_group] += 1
