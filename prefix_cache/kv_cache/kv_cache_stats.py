"""Counters of a KV-cache manager: pages by state, hit tokens, and reasons of misses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal, TypeAlias

from prefix_cache.blocks.block_pool import BlockPool
from prefix_cache.specs.kv_cache_spec import KVCacheConfig, spec_in_words

ITEM_ROWS = "rows of items"
"""Kind of the page group of tower rows, which follows the layer groups."""


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Usage of the pool by one group of layers.

    Attributes:
        kind: description of the group's layer type.
        held: blocks in at least one request's table.
        cached: blocks that no request holds, findable by content until they are evicted.
        block_bytes: size of one block on the device; 0 for a host group.
        evictions: cached blocks evicted for others, since the start.
        misses: prefix hits of admitted requests that ended because the group lacked the blocks to
            continue, while the tokens' own block was cached.
    """

    kind: str
    held: int
    cached: int
    block_bytes: int
    evictions: int = 0
    misses: int = 0

    def beside(self, other: GroupStats) -> GroupStats:
        """Return the sum of both, for pools of the same model."""
        counts = ("held", "cached", "evictions", "misses")
        return replace(self, **{n: getattr(self, n) + getattr(other, n) for n in counts})


@dataclass(frozen=True, slots=True)
class KVCacheStats:
    """Snapshot of a pool. ``free + held + cached + 1 (null) == num_blocks``.

    These count large pages of the device; with one group of layers those are its blocks.

    Attributes:
        num_blocks: pages of the pool, including the null block.
        free: pages without content.
        held: pages with a block in at least one request's table.
        cached: pages that no request holds, with blocks findable by content until they are evicted.
        evictions: cached blocks evicted for others, since the start.
        hit_tokens: cached tokens that admitted requests hit, since the start.
        queried_tokens: tokens in full blocks of admitted requests, since the start.
        nbytes: device bytes reserved for the pool; 0 for a pool without its own memory.
        output_bytes: host bytes reserved for mirrored outputs.
        groups: usage per group of layers, in their order, followed by the pages of item rows; empty
            for a pool without its own memory.
        misses: how often a request's prefix hit ended early, by :data:`PrefixMiss`.
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
        """Pages of rows of images, audio and videos; None for a model without towers."""
        return next((group for group in self.groups if group.kind == ITEM_ROWS), None)

    @classmethod
    def of_pool(cls, pool: BlockPool, hit_tokens: int, queried_tokens: int) -> KVCacheStats:
        """Count the pages by state; the caller provides the token counts."""
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
        """Return a copy with the usage per group of layers and the size of the outputs."""
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
        """Return the sum of both, for engines that run the same model."""
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
"""Reason why a prefix hit was not longer, determined by the block at which it ended.

- ``off``: prefix caching is disabled.
- ``short``: the prompt has no full block before its last token.
- ``last_token``: the block is cached, but ends with the prompt's last token, which is always run.
- ``salt``: no cached prefix under the prompt's ``cache_salt``; other salts are not searched.
- ``unseen``: the block is not cached, and not known to have been.
- ``evicted``: it was cached, but has been evicted.
- ``group``: it is cached, but another group of layers (windows, states) lacks what it needs.
- ``rows``: it is cached, but rows of a wanted output are missing.
"""
