"""Rows that come beside a sequence's tokens, some of them while it already runs.

::

    position    0 ......... n-1 | n | n+1 | ...        | last known | not known yet
    input       row alone       | embedding of the token + row      | must not run
                |<- replaced -->|                                   (or, once complete, the
                                                                     filler row for ever)
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_cache import ContentSpan, content_hash

__all__ = ["StreamedRows"]


class StreamedRows:
    """One row per position; several completions of one prompt share them.

    Args:
        rows: ``(num_rows, width)`` of the positions from 0 on, on the host; copied.
        num_replaced: positions whose token counts for nothing: their row is all the input. At
            later positions row and token embedding are added up.
    """

    def __init__(self, rows: Tensor, num_replaced: int) -> None:
        self.num_replaced = num_replaced
        self._num_rows = rows.shape[0]
        self._rows = rows.clone()  # with room to grow behind the known rows
        self._hashes: list[bytes] = []
        self._filler: Tensor | None = None
        self._filler_hash = b""

    @property
    def is_complete(self) -> bool:
        """Whether every row is known, however long the sequence gets."""
        return self._filler is not None

    def num_known(self, limit: int) -> int:
        """Leading positions, of ``limit``, whose row is known."""
        return limit if self.is_complete else min(limit, self._num_rows)

    def extend(self, rows: Tensor) -> None:
        """Add the next positions' rows, ``(n, width)`` in the type of the others.

        Raises:
            ValueError: all rows are known already.
        """
        if self.is_complete:
            raise ValueError("the rows had ended, but more came")
        num_rows = self._num_rows + rows.shape[0]
        if num_rows > self._rows.shape[0]:
            # Doubled, so that many small chunks do not copy all rows each time.
            grown = self._rows.new_empty(max(num_rows, 2 * self._num_rows), self._rows.shape[1])
            grown[: self._num_rows] = self._rows[: self._num_rows]
            self._rows = grown
        self._rows[self._num_rows : num_rows] = rows
        self._num_rows = num_rows

    def complete(self, filler: Tensor) -> None:
        """Say that all positions to come have the row ``filler``, ``(width,)``.

        Raises:
            ValueError: that had been said.
        """
        if self.is_complete:
            raise ValueError("the rows had ended already")
        self._filler = filler.clone()
        self._filler_hash = content_hash(filler)

    def cut(self, start: int, stop: int) -> Tensor:
        """Rows ``(stop - start, width)`` of positions that are known.

        Raises:
            ValueError: some are not.
        """
        if self.num_known(stop) < stop:
            raise ValueError(f"rows [{start}, {stop}) were asked for, {self._num_rows} are known")
        rows = self._rows[min(start, self._num_rows) : min(stop, self._num_rows)]
        if self._filler is None or len(rows) == stop - start:
            return rows
        return torch.cat([rows, self._filler.expand(stop - start - len(rows), -1)])

    def apply(self, embeds: Tensor, start: int) -> None:
        """Turn token embeddings ``(n, width)`` of positions from ``start`` on into inputs.

        Args:
            embeds: changed in place.
            start: position of the first.
        """
        rows = self.cut(start, start + embeds.shape[0]).to(embeds.device)
        num_replaced = min(max(0, self.num_replaced - start), embeds.shape[0])
        embeds[:num_replaced] = rows[:num_replaced]
        embeds[num_replaced:] += rows[num_replaced:]

    def spans(self, start: int, stop: int) -> tuple[ContentSpan, ...]:
        """What keys the blocks in ``[start, stop)``, all of it known.

        One span per position: a block's hash must not depend on chunks, nor on what follows.
        """
        for row in self._rows[len(self._hashes) : min(stop, self._num_rows)]:
            self._hashes.append(content_hash(row))
        return tuple(
            ContentSpan(
                "row_alone" if position < self.num_replaced else "row_added",
                position,
                1,
                self._hashes[position] if position < self._num_rows else self._filler_hash,
            )
            for position in range(start, stop)
        )
