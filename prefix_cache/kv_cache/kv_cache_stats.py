"""Where the pages of a cache are, and how many tokens were found in it."""

from __future__ import annotations

from dataclasses import dataclass

from prefix_cache.blocks.block_pool import BlockPool

__all__ = ["KVCacheStats"]


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
    """

    num_blocks: int
    free: int
    held: int
    cached: int
    evictions: int
    hit_tokens: int
    queried_tokens: int

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
