"""One item of a prompt that is not text, and where its rows lie in the token stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
                           |<-- length -->|          row i of the encoder's output goes to
                           offset                    position offset + i

    Attributes:
        modality: what it is.
        offset: first placeholder position in the expanded prompt.
        length: placeholder tokens, as many as the encoder's output has rows.
        content_hash: digest of everything that the encoder's output depends on.
        features: what the tower gets, by transformers' argument names, for this one item.
    """

    modality: Modality
    offset: int
    length: int
    content_hash: bytes
    features: Mapping[str, Tensor]

    @property
    def end(self) -> int:
        """First position after the item."""
        return self.offset + self.length

    @property
    def span(self) -> ContentSpan:
        """What keys the blocks that the item lies in."""
        return ContentSpan(self.modality, self.offset, self.length, self.content_hash)

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether any of the item's rows lie in ``[start, stop)``."""
        return self.offset < stop and self.end > start
