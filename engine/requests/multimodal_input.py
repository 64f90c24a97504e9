"""One item of a prompt that is not text, and where its rows lie in the token stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from torch import Tensor

from prefix_cache import ContentSpan

__all__ = ["Modality", "MultiModalInput"]

Modality: TypeAlias = Literal["image", "audio", "video"]
"""What a prompt can show beside its text."""


@dataclass(frozen=True, slots=True, eq=False)
class MultiModalInput:
    """What a tower gets for one image or the like, and the placeholders that its rows replace.

    ::

        token_ids  | a | b | * | * | * | * | c |     * = placeholder
                           |<-- length -->|          row i of the tower's output goes to
                           offset                    position offset + i

    Rows of a video with its sound come in turns. Each piece is an input, with the features of the
    whole; pieces of one item share its hash, so that its tower runs once for all of them::

        tower's output  | rows_before | length | rows_after |      num_rows of them

    Attributes:
        modality: what it is.
        offset: first placeholder position in the expanded prompt.
        length: placeholder tokens, one for each of its rows.
        content_hash: digest of everything that the tower's output depends on.
        features: what the tower gets, by transformers' argument names, for this one item.
        rows_before: rows of the tower's output that lie in earlier pieces.
        rows_after: those that lie in later ones.
        whole: of a piece, what it is a piece of, with the tokens around it.
    """

    modality: Modality
    offset: int
    length: int
    content_hash: bytes
    features: Mapping[str, Tensor]
    rows_before: int = 0
    rows_after: int = 0
    whole: ContentSpan | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the tower's output."""
        return self.rows_before + self.length + self.rows_after

    @property
    def end(self) -> int:
        """First position after the item."""
        return self.offset + self.length

    @property
    def span(self) -> ContentSpan:
        """What keys the blocks that the item lies in."""
        return self.whole or ContentSpan(self.modality, self.offset, self.length, self.content_hash)

    def piece(self, rows: range, offset: int, whole: ContentSpan) -> MultiModalInput:
        """Some of the rows of a whole item, at another place."""
        rows_after = self.num_rows - rows.stop
        return replace(
            self,
            offset=offset,
            length=len(rows),
            rows_before=rows.start,
            rows_after=rows_after,
            whole=whole,
        )

    def rows_in(self, start: int, stop: int) -> slice:
        """The rows of the tower's output for the item's positions in ``[start, stop)``."""
        shift = self.rows_before - self.offset
        return slice(max(start, self.offset) + shift, min(stop, self.end) + shift)

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether any of the item's rows lie in ``[start, stop)``."""
        return self.offset < stop and self.end > start
