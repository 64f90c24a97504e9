"""Blocks that running requests are about to fill."""

from __future__ import annotations

from collections.abc import Iterable

from prefix_cache.blocks.block_hash import BlockHash

__all__ = ["PendingBlocks"]


class PendingBlocks:
    """Which hashes are being computed, and by whom.

    A request that needs such a block does better to wait a step than to compute it again.

    Attributes:
        owners: hash to the ids of the requests that compute it, never empty; for reading only.
    """

    def __init__(self) -> None:
        self.owners: dict[BlockHash, set[str]] = {}
        self._hashes: dict[str, set[BlockHash]] = {}

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self.owners

    def add(self, request_id: str, block_hashes: Iterable[BlockHash]) -> None:
        """Note that a request computes these blocks."""
        hashes = self._hashes.setdefault(request_id, set())
        for block_hash in block_hashes:
            hashes.add(block_hash)
            self.owners.setdefault(block_hash, set()).add(request_id)

    def remove(self, request_id: str, block_hashes: Iterable[BlockHash]) -> None:
        """Note that a request has computed these blocks; unknown ones are passed over."""
        pending = self._hashes.get(request_id)
        if not pending:
            return
        for block_hash in pending.intersection(block_hashes):
            pending.discard(block_hash)
            owners = self.owners[block_hash]
            owners.discard(request_id)
            if not owners:
                del self.owners[block_hash]

    def drop_request(self, request_id: str) -> None:
        """Note that a request will compute nothing more."""
        self.remove(request_id, tuple(self._hashes.get(request_id, ())))
        self._hashes.pop(request_id, None)

    def clear(self) -> None:
        """Forget everything."""
        self.owners.clear()
        self._hashes.clear()
