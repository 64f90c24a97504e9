"""What a YAML text may ask for before anything is made of it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DocumentLimits"]


@dataclass(frozen=True, slots=True)
class DocumentLimits:
    """Bounds that hold while a text is parsed; a pipeline's file is far below all of them.

    Attributes:
        max_chars: characters of the text.
        max_depth: how deep lists and mappings may nest, what aliases stand for included.
        max_nodes: keys and values, counted anew wherever an alias stands for them, so that a few
            lines cannot stand for a billion.
        max_number_chars: digits of a number; a longer one is no setting.
    """

    max_chars: int = 2**18
    max_depth: int = 64
    max_nodes: int = 100_000
    max_number_chars: int = 64
