"""Counters of a KV-cache manager: where the pages are, how much was found, and why no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal, TypeAlias

from prefix_cache.blocks.block_pool import BlockPool
from prefix_cache.specs.kv_cache_spec import KVCacheConfig, spec_in_words

ITEM_ROWS = "rows of items"
"""The kind of the group of pages that towers' rows lie in, behind those of layers."""


@dataclass(frozen=True, slots=True)
class GroupStats:
    """What one group of layers has of the pool.

    Attributes:
        kind: what its layers keep, in words.
        held: blocks that are in at least one request's table.
        cached: blocks that no request holds, findable by content until they are evicted.
        block_bytes: of one block on the device; 0 for a group of the host.
        evictions: cached blocks given up for others, since the start.
        misses: prefixes of admitted requests that ended because the group lacked what it needs to
            go on, while the tokens' own block was cached.
    """

    kind: str
    held: int
    cached: int
    block_bytes: int
    evictions: int = 0
    misses: int = 0

    def beside(self, other: GroupStats) -> GroupStats:
        """Both together, of pools for the same model."""
        counts = ("held", "cached", "evictions", "misses")
        return replace(self, **{n: getattr(self, n) + getattr(other, n) for n in counts})


@dataclass(frozen=True, slots=True)
class KVCacheStats:
    """A snapshot. ``free + held + cached + 1 (null) == num_blocks``.

    These count large pages of the device; with one group of layers those are its blocks.

    Attributes:
        num_blocks: of the pool, the null block included.
        free: pages without content.
        held: pages of which a block is in at least one request's table.
        cached: pages that no request holds, with blocks findable by content until they are evicted.
        evictions: cached blocks given up for others, since the start.
        hit_tokens: tokens that admitted requests found cached, since the start.
        queried_tokens: tokens in full blocks of admitted requests, since the start.
        nbytes: reserved for the pool on the device; 0 for a pool without memory of its own.
        output_bytes: reserved on the host for the outputs that are mirrored.
        groups: what each group of layers has of it, in their order, and behind them the pages of
            rows of items; none for such a pool.
        misses: how often a request's prefix was not hit further, by :data:`PrefixMiss`.
    """

    num_blocks: int
    free: int
    held: int
    cached: int
    evictions: int
    hit_tokens: int
    queried_tokens: int
    nbytes: int = 0
    output_bytes: int = 0
    groups: tuple[GroupStats, ...] = ()
    misses: Mapping[str, int] = field(default_factory=dict)

    @property
    def items(self) -> GroupStats | None:
        """The pages of rows of images, sounds and videos; None for a model without towers."""
        return next((group for group in self.groups if group.kind == ITEM_ROWS), None)

    @classmethod
    def of_pool(cls, pool: BlockPool, hit_tokens: int, queried_tokens: int) -> KVCacheStats:
        """Where the pages are now; the counts of tokens are the caller's."""
        device = pool.arenas[0]
        return cls(
            num_blocks=len(device.pages),
            free=len(device.free_pages),
            held=len(device.pages) - 1 - device.num_available,
            cached=len(device.unheld),
            evictions=pool.num_evictions,
            hit_tokens=hit_tokens,
            queried_tokens=queried_tokens,
        )

    def in_groups(
        self,
        pool: BlockPool,
        config: KVCacheConfig,
        output_bytes: int,
        group_misses: Mapping[int, int],
    ) -> KVCacheStats:
        """The same with what each group of layers has of the pool, and the outputs' bytes."""
        of_pool = {g: pages for arena in pool.arenas for g, pages in arena.groups.items()}
        kinds = [
            (spec_in_words(group.spec), group.page_bytes if group.on_device else 0)
            for group in config.groups
        ]
        if config.item_page_bytes:
            kinds.append((ITEM_ROWS, config.item_page_bytes))
        groups = tuple(
            GroupStats(
                kind,
                of_pool[index].num_held,
                len(of_pool[index].cached),
                page_bytes,
                pool.evictions[index],
                group_misses.get(index, 0),
            )
            for index, (kind, page_bytes) in enumerate(kinds)
        )
        nbytes = config.num_large_pages * config.large_page_bytes
        return replace(self, nbytes=nbytes, output_bytes=output_bytes, groups=groups)

    def beside(self, other: KVCacheStats) -> KVCacheStats:
        """Both pools together, of engines that run the same model."""
        counts = [each.name for each in fields(self) if each.name not in ("groups", "misses")]
        pairs = zip(self.groups, other.groups, strict=True)
        return KVCacheStats(
            **{name: getattr(self, name) + getattr(other, name) for name in counts},
            groups=tuple(mine.beside(their) for mine, their in pairs),
            misses=dict(Counter(self.misses) + Counter(other.misses)),
        )


PrefixMiss: TypeAlias = Literal[
    "off", "short", "last_token", "salt", "unseen", "evicted", "group", "rows"
]
"""Why a prefix was not hit further, by the block at which the hit ended.

- ``off``: prefix caching is switched off.
- ``short``: the prompt has no full block before its last token.
- ``last_token``: the block is cached, but ends with the prompt's last token, which is always run.
- ``salt``: nothing begins like the prompt under its ``cache_salt``; other salts are not searched.
- ``unseen``: the block is not cached, nor known to have been.
- ``evicted``: it was cached, and gave way to others.
- ``group``: it is cached, but not what another group of layers (windows, states) needs to go on.
- ``rows``: it is cached without rows of an output that is wanted.
"""
