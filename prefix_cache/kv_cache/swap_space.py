"""Pages in host memory to which a request's pages can move, and from which they come back.

Swapping moves whole tables, every group's, and the output rows beside them::

    device pages   | A A B B B . |  swap out A   | . . B B B . |  swap in A    | . A B B B A |
    host pages     | . . . .     |  ──────────►  | A A . .     |  ──────────►  | . . . .     |

Pages are free as soon as the decision is made, the device's by a swap out and the host's by a swap
in, so the bytes must be copied before anything else is written, and in the order of the decisions:
what goes out may take host pages from which a request before it has come back, and what comes in,
device pages that one before it has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from prefix_cache.blocks.block import BlockHash, KVCacheBlock
from prefix_cache.blocks.block_pool import BlockPool
from prefix_cache.kv_cache.kv_cache_manager import KVCacheManager, SavedRows
from prefix_cache.layer_types.coordinator import ChunkStops
from prefix_cache.stores.paged_memory import PageCopy


@dataclass(frozen=True, slots=True)
class _Swapped:
    """One request's tables on the host; None where a table held the null block.

    Attributes:
        rows: output rows of its computed tokens and of its encoder sequence.
        resets_before: see :meth:`KVCacheManager.resets_before`.
    """

    tables: tuple[tuple[KVCacheBlock | None, ...], ...]
    rows: SavedRows
    num_tokens: int
    stops: ChunkStops | None
    resets_before: int


class SwapSpace:
    """Host pages beside a manager's device pages.

    Args:
        num_pages: large pages on the host, the null page included.

    Raises:
        ValueError: if there is no page beside the null page.
    """

    def __init__(self, manager: KVCacheManager, num_pages: int) -> None:
        self._manager = manager
        self.config = replace(manager.config, num_large_pages=num_pages)
        self.clear()

    def clear(self) -> None:
        """Forget every request, in whatever state an interrupted call left them."""
        self.pool = BlockPool.for_config(self.config)
        self._swapped: dict[str, _Swapped] = {}

    @property
    def request_ids(self) -> frozenset[str]:
        """Requests whose pages are here."""
        return frozenset(self._swapped)

    def swap_out(self, request_id: str, num_computed_tokens: int) -> tuple[PageCopy, ...] | None:
        """Give a request's device blocks back and take host blocks for their content.

        Args:
            request_id: one that holds device blocks.
            num_computed_tokens: tokens whose state and rows are worth keeping.

        Returns:
            What to copy from device to host; None, and nothing has changed, if it does not fit.

        Raises:
            ValueError: if the request holds no blocks.
        """
        managers = self._manager.coordinator.managers
        tables = [manager.table(request_id) for manager in managers]
        held = [[block for block in table if block.large_page is not None] for table in tables]
        needs = {group_id: len(blocks) for group_id, blocks in enumerate(held)}
        if not self.pool.can_allocate(needs):
            return None
        taken = self.pool.allocate(needs)
        self._swapped[request_id] = _Swapped(
            tables=tuple(_like(table, taken[group_id]) for group_id, table in enumerate(tables)),
            rows=self._manager.outputs.save(request_id, num_computed_tokens),
            num_tokens=num_computed_tokens,
            stops=self._manager.coordinator.stops.get(request_id),
            resets_before=self._manager.resets_before(request_id),
        )
        self._manager.free(request_id)
        return self._copies(held, [taken[g] for g in needs])

    def swap_in(
        self, request_id: str, block_hashes: Sequence[BlockHash] = (), *, headroom: int = 0
    ) -> tuple[PageCopy, ...] | None:
        """Take device blocks for a swapped request and give its host blocks back.

        Args:
            request_id: one that was swapped out.
            block_hashes: of its full blocks; those not computed yet are in flight again.
            headroom: blocks that must be left over in every group of the device.

        Returns:
            What to copy from host to device; None, and nothing has changed, if it does not fit.

        Raises:
            ValueError: if the request is not swapped out.
        """
        swapped = self._get(request_id)
        held = [[block for block in table if block is not None] for table in swapped.tables]
        needs = {group_id: len(blocks) for group_id, blocks in enumerate(held)}
        pool = self._manager.pool
        if not pool.can_allocate({g: count + headroom for g, count in needs.items()}):
            return None
        taken = pool.allocate(needs)
        tables = [
            [block or manager.null_block for block in _like(table, taken[manager.group_id])]
            for manager, table in zip(
                self._manager.coordinator.managers, swapped.tables, strict=True
            )
        ]
        self._manager.restore(
            request_id,
            tables,
            swapped.num_tokens,
            block_hashes,
            swapped.stops,
            resets_before=swapped.resets_before,
        )
        self._manager.outputs.restore(request_id, swapped.rows)
        copies = self._copies(held, [taken[g] for g in needs])
        self.free(request_id)
        return copies

    def free(self, request_id: str) -> None:
        """Give back the host blocks of a request. ``ValueError`` if it is not swapped out."""
        swapped = self._get(request_id)
        del self._swapped[request_id]
        for table in swapped.tables:
            self.pool.release(block for block in reversed(table) if block is not None)

    def tables(self) -> list[list[KVCacheBlock]]:
        """All host tables without their gaps, for integrity checks."""
        return [
            [block for block in table if block is not None]
            for swapped in self._swapped.values()
            for table in swapped.tables
        ]

    def _get(self, request_id: str) -> _Swapped:
        swapped = self._swapped.get(request_id)
        if swapped is None:
            raise ValueError(f"request {request_id!r} is not swapped out")
        return swapped

    def _copies(
        self, sources: Sequence[Sequence[KVCacheBlock]], targets: Sequence[Sequence[KVCacheBlock]]
    ) -> tuple[PageCopy, ...]:
        return tuple(
            PageCopy(
                group_id,
                tuple(block.block_id for block in sources[group_id]),
                tuple(block.block_id for block in targets[group_id]),
            )
            for group_id, group in enumerate(self.config.groups)
            if group.on_device and sources[group_id]
        )


def _like(
    table: Sequence[KVCacheBlock | None], blocks: Sequence[KVCacheBlock]
) -> tuple[KVCacheBlock | None, ...]:
    """A table of other blocks with the same gaps."""
    rest = iter(blocks)
    return tuple(
        next(rest) if old is not None and old.large_page is not None else None for old in table
    )
