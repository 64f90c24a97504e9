"""Host memory to which a request's pages are swapped out, and from which they are swapped in.

Swapping moves the whole tables of every group, and the mirrored output rows::

    device pages   | A A B B B . |  swap out A   | . . B B B . |  swap in A    | . A B B B A |
    host pages     | . . . .     |  ──────────►  | A A . .     |  ──────────►  | . . . .     |

Pages are freed as soon as the decision is made: device pages by a swap-out, host pages by a
swap-in. So the bytes must be copied before anything else is written, and in order of the decisions:
a swap-out may reuse host pages of an earlier swap-in, and a swap-in may reuse device pages of an
earlier swap-out.
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
    """Host tables of one request; None where a table had the null block.

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
    """Host pages to which the requests of a manager can be swapped out.

    Args:
        num_pages: number of large pages on the host, including the null page.

    Raises:
        ValueError: if there is no page besides the null page.
    """

    def __init__(self, manager: KVCacheManager, num_pages: int) -> None:
        self._manager = manager
        self.config = replace(manager.config, num_large_pages=num_pages)
        self.clear()

    def clear(self) -> None:
        """Forget every request, even if an interrupted call left them inconsistent."""
        self.pool = BlockPool.for_config(self.config)
        self._swapped: dict[str, _Swapped] = {}

    @property
    def request_ids(self) -> frozenset[str]:
        """Ids of requests that are swapped out."""
        return frozenset(self._swapped)

    def swap_out(self, request_id: str, num_computed_tokens: int) -> tuple[PageCopy, ...] | None:
        """Free a request's device blocks and allocate host blocks for their content.

        Args:
            request_id: a request that holds device blocks.
            num_computed_tokens: tokens whose state and rows to keep.

        Returns:
            Copies to make from device to host; None, with nothing changed, if it does not fit.

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
        """Allocate device blocks for a swapped-out request and free its host blocks.

        Args:
            request_id: a request that is swapped out.
            block_hashes: hashes of its full blocks; those not computed yet are in flight again.
            headroom: blocks that must remain free in every group of the device.

        Returns:
            Copies to make from host to device; None, with nothing changed, if it does not fit.

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
        """Free the host blocks of a request. ``ValueError`` if it is not swapped out."""
        swapped = self._get(request_id)
        del self._swapped[request_id]
        for table in swapped.tables:
            self.pool.release(block for block in reversed(table) if block is not None)

    def tables(self) -> list[list[KVCacheBlock]]:
        """Return all host tables without their gaps, for integrity checks."""
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
    """Return a table of ``blocks`` with the gaps of ``table``."""
    rest = iter(blocks)
    return tuple(
        next(rest) if old is not None and old.large_page is not None else None for old in table
    )
