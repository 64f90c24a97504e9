"""What encoders made of images and the like, found by content, shared by all that show the same.

The rows of an item are wanted for as long as some of its placeholders are still to be computed.
That may take several steps, as chunks may end inside an item; a request in its middle holds it::

    item      |<----- 6 rows ----->|
    step 1    |#########|               held: by every request that has begun and not ended it
    step 2              |##########|    released: no request holds it, yet it stays to be found
                                        until others need its place (least recently used first)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, fields

from torch import Tensor

from prefix_cache.blocks.block import IntegrityError

__all__ = ["EncoderCache", "EncoderCacheStats"]


@dataclass(slots=True)
class _Entry:
    """One item; ``rows`` is None between its reservation and the encoder's run."""

    nbytes: int
    num_holders: int = 1
    rows: Tensor | None = None


@dataclass(frozen=True, slots=True)
class EncoderCacheStats:
    """Counters since the cache was made, and what is in it now.

    Attributes:
        hits: how often an item was held that was there, or about to be.
        encoded: items that were run through the encoder.
        evictions: items that made room for others.
        num_items: items now.
        held_bytes: of items that requests hold.
        nbytes: of all items.
        capacity_bytes: the budget.
    """

    hits: int
    encoded: int
    evictions: int
    num_items: int
    held_bytes: int
    nbytes: int
    capacity_bytes: int

    def beside(self, other: EncoderCacheStats) -> EncoderCacheStats:
        """Both caches together."""
        sums = {each.name: getattr(self, each.name) + getattr(other, each.name)
                for each in fields(self)}  # fmt: skip
        return EncoderCacheStats(**sums)


class EncoderCache:
    """Encoder outputs by content hash, reference counted, within a budget of bytes.

    The life of an item: :meth:`hold`; if that finds nothing, :meth:`reserve`, run the encoder,
    :meth:`fill`; in either case read :meth:`rows`, then :meth:`release`.

    Args:
        capacity_bytes: most bytes of all items together, held or not.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 1:
            raise ValueError(f"capacity_bytes must be at least 1, got {capacity_bytes}")
        self.capacity_bytes = capacity_bytes
        self._hits = 0
        self._encoded = 0
        self._evictions = 0
        self.clear()

    def clear(self) -> None:
        """Forget all items and who holds them, in whatever state an interrupted call left them."""
        self._held: dict[bytes, _Entry] = {}
        self._unheld: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._held_bytes = 0
        self._unheld_bytes = 0

    def __contains__(self, content_hash: bytes) -> bool:
        return content_hash in self._held or content_hash in self._unheld

    def has_room(self, nbytes: int) -> bool:
        """Whether an item of so many bytes fits beside those that are held."""
        return self._held_bytes + nbytes <= self.capacity_bytes

    def hold(self, content_hash: bytes) -> bool:
        """Take a reference to an item that is there, or about to be; False if it is not."""
        entry = self._held.get(content_hash)
        if entry is None:
            entry = self._unheld.pop(content_hash, None)
            if entry is None:
                return False
            self._unheld_bytes -= entry.nbytes
            self._held_bytes += entry.nbytes
            self._held[content_hash] = entry
        entry.num_holders += 1
        self._hits += 1
        return True

    def reserve(self, content_hash: bytes, nbytes: int) -> None:
        """Make room for an item that is about to be encoded, and take the first reference to it.

        Raises:
            ValueError: the item is there already, or does not fit beside those that are held.
        """
        if content_hash in self:
            raise ValueError("the item is in the cache already: hold it instead")
        if not self.has_room(nbytes):
            raise ValueError(
                f"an item of {nbytes} bytes does not fit beside {self._held_bytes} bytes that are "
                f"held, the cache takes {self.capacity_bytes}"
            )
        while self._held_bytes + self._unheld_bytes + nbytes > self.capacity_bytes:
            _, evicted = self._unheld.popitem(last=False)
            self._unheld_bytes -= evicted.nbytes
            self._evictions += 1
        self._held[content_hash] = _Entry(nbytes)
        self._held_bytes += nbytes

    def fill(self, content_hash: bytes, rows: Tensor) -> None:
        """Store what the encoder made, ``(length, ...)``, in the place that was reserved for it.

        Raises:
            ValueError: the place is filled already, or of another size.
        """
        entry = self._held[content_hash]
        if entry.rows is not None:
            raise ValueError("the item has its rows already")
        if rows.nbytes != entry.nbytes:
            raise ValueError(
                f"the encoder gave {rows.nbytes} bytes in rows {tuple(rows.shape)}, reserved "
                f"were {entry.nbytes}"
            )
        # A slice of a batch would keep the memory of the whole batch.
        is_whole = rows.untyped_storage().nbytes() == rows.nbytes
        entry.rows = rows if is_whole else rows.clone()
        self._encoded += 1

    def rows(self, content_hash: bytes) -> Tensor:
        """The rows of an item that a request holds.

        Raises:
            KeyError: no request holds it.
            ValueError: it was reserved, but not encoded yet.
        """
        rows = self._held[content_hash].rows
        if rows is None:
            raise ValueError("the item has a place, but was not encoded yet")
        return rows

    def release(self, content_hash: bytes) -> None:
        """Give a reference back; an item that was never encoded goes with the last one."""
        entry = self._held[content_hash]
        entry.num_holders -= 1
        if entry.num_holders:
            return
        del self._held[content_hash]
        self._held_bytes -= entry.nbytes
        if entry.rows is not None:
            self._unheld[content_hash] = entry
            self._unheld_bytes += entry.nbytes

    def reset(self) -> None:
        """Forget all items that no request holds."""
        self._unheld.clear()
        self._unheld_bytes = 0

    def stats(self) -> EncoderCacheStats:
        """Counters, and what is there now."""
        return EncoderCacheStats(
            hits=self._hits,
            encoded=self._encoded,
            evictions=self._evictions,
            num_items=len(self._held) + len(self._unheld),
            held_bytes=self._held_bytes,
            nbytes=self._held_bytes + self._unheld_bytes,
            capacity_bytes=self.capacity_bytes,
        )

    def check_integrity(self, num_holders: Mapping[bytes, int]) -> None:
        """Compare with who holds what, and sizes with their sums.

        Args:
            num_holders: references of each held item, as the holders know them.

        Raises:
            IntegrityError: with the equation that failed.
        """
        counted = {key: entry.num_holders for key, entry in self._held.items()}
        if counted != dict(num_holders):
            raise IntegrityError(
                f"references counted {sorted(counted.values())} != "
                f"references held {sorted(num_holders.values())} of the encoder cache's items"
            )
        for name, entries, nbytes in (
            ("held", self._held, self._held_bytes),
            ("unheld", self._unheld, self._unheld_bytes),
        ):
            total = sum(entry.nbytes for entry in entries.values())
            if total != nbytes:
                raise IntegrityError(f"sum of {name} items {total} != bytes counted {nbytes}")
        if self._held_bytes + self._unheld_bytes > self.capacity_bytes:
            raise IntegrityError(
                f"bytes of all items {self._held_bytes + self._unheld_bytes} > capacity "
                f"{self.capacity_bytes}"
            )
