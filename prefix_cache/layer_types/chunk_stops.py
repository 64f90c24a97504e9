"""Where the chunks of a prefill should end, so that states are kept where hits are likely."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ChunkStops"]


@dataclass(frozen=True, slots=True)
class ChunkStops:
    """Ends of chunks for models whose layers keep states.

    A state is known only after the last token of a step. A request of 20 tokens in blocks of 4,
    whose first 12 another request has in common, with a budget of 10 tokens a step::

        tokens  | 0 . . . . . . . | 8 . . . | 12 . . . | 16 . . . |
        chunks  | 8               | 4       | 4        | 4        |
                  whole blocks      shared    last whole block that leaves a token to run

    Attributes:
        block_size: tokens per block; states are found at the ends of blocks.
        ends: numbers of tokens, whole blocks, after which a chunk must end.
    """

    block_size: int
    ends: tuple[int, ...]

    def clip(self, start: int, num_tokens: int, total: int) -> int:
        """How many of ``num_tokens`` tokens from ``start`` on to run now, at least 1.

        Args:
            start: tokens computed.
            num_tokens: that the budget allows.
            total: tokens of the sequence so far; a chunk that does not reach it ends with a block.
        """
        end = start + num_tokens
        if end < total:
            whole = end // self.block_size * self.block_size
            end = whole if whole > start else end
        return min([end, *(stop for stop in self.ends if stop > start)]) - start
