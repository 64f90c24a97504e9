"""What of a segment is free, and which of its pages take memory."""

from __future__ import annotations

import numpy as np

from stages.remote.segment import PAGE_BYTES, Segment

__all__ = ["Arena"]


class Arena:
    """Hands out ranges of a segment. Starts and sizes are whole pages, in bytes.

    Args:
        segment: all of it is free.

    Attributes:
        segment: as given.
        num_places: ranges that are taken.
        is_retired: whether no more ranges may be taken, since a reader that is gone or stuck may
            still read what was given back.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.num_places = 0
        self.is_retired = False
        self._free = [(0, segment.size)]  # in order; no two touch
        self._has_memory = np.zeros(segment.size // PAGE_BYTES, bool)

    @property
    def memory_bytes(self) -> int:
        """Of the pages that take memory."""
        return int(self._has_memory.sum()) * PAGE_BYTES

    def find(self, size: int) -> int | None:
        """The lowest free range that is large enough: so high pages may never be used at all."""
        return next((at for at, end in self._free if end - at >= size), None)

    def take(self, start: int, size: int) -> int:
        """Take a range that :meth:`find` found, with memory behind it; how much of that is new.

        Raises:
            MemoryError: there is none; nothing is taken.
        """
        pages = self._has_memory[start // PAGE_BYTES : (start + size) // PAGE_BYTES]
        missing = len(pages) - int(pages.sum())
        if missing:
            self.segment.reserve(start, size)
            pages[:] = True
        index = next(i for i, (at, _) in enumerate(self._free) if at == start)
        _, end = self._free.pop(index)
        if start + size < end:
            self._free.insert(index, (start + size, end))
        self.num_places += 1
        return missing * PAGE_BYTES

    def give_back(self, start: int, size: int) -> None:
        """Let a range that was taken be free; it is joined with its neighbours."""
        end = start + size
        before = [each for each in self._free if each[1] < start]
        after = [each for each in self._free if each[0] > end]
        for at, until in self._free[len(before) : len(self._free) - len(after)]:
            start, end = min(start, at), max(end, until)
        self._free = [*before, (start, end), *after]
        self.num_places -= 1

    def drop_idle_pages(self) -> int:
        """Give the memory behind free ranges back; how many bytes that were."""
        dropped = 0
        for start, end in self._free:
            pages = self._has_memory[start // PAGE_BYTES : end // PAGE_BYTES]
            if pages.any() and self.segment.drop_pages(start, end - start):
                dropped += int(pages.sum()) * PAGE_BYTES
                pages[:] = False
        return dropped
