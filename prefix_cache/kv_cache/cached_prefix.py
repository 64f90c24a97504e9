"""What of a request is computed already."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from prefix_cache.blocks.block import KVCacheBlock
from prefix_cache.blocks.block_hash import BlockHash, whole_input_block_hashes
from prefix_cache.layer_types.chunk_stops import ChunkStops

__all__ = ["CachedPrefix", "EncoderBlocks", "PrefixMiss"]


PrefixMiss: TypeAlias = Literal[
    "off", "short", "last_token", "salt", "unseen", "evicted", "group", "rows"
]
"""Why a prefix was not hit further, by the block at which the hit ended.

- ``off``: prefix caching is switched off.
- ``short``: the prompt has no full block before its last token.
- ``last_token``: the block is cached, but ends with the prompt's last token, which is always run.
- ``salt``: nothing begins like the prompt under its ``cache_salt``; under others nobody looks.
- ``unseen``: the block is not cached, nor known to have been.
- ``evicted``: it was cached, and gave way to others.
- ``group``: it is cached, but not what another group of layers (windows, states) needs to go on.
- ``rows``: it is cached without rows of an output that is wanted.
"""


@dataclass(frozen=True, slots=True)
class EncoderBlocks:
    """The encoder sequence of a request, as cross-attention keeps it.

    Attributes:
        num_tokens: of the encoder's output.
        hashes: one per block, the partial last one included.
    """

    num_tokens: int
    hashes: tuple[BlockHash, ...]

    @classmethod
    def of(cls, content_hash: BlockHash, num_tokens: int, block_size: int) -> EncoderBlocks:
        """The blocks of an encoder input whose output has ``num_tokens`` rows."""
        hashes: Iterator[BlockHash] = whole_input_block_hashes(content_hash, num_tokens, block_size)
        return cls(num_tokens, tuple(hashes))


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """What of a prompt is computed already. No reference is held: valid until the next change.

    Attributes:
        blocks: per group, what holds the prefix; of cross-attention all the encoder's, or none.
        num_tokens: its length, whole blocks, at most one token less than the prompt.
        in_flight: a running request computes the next block, or the encoder's, now: wait a step.
        stops: where the rest of the prefill should end its chunks.
        encoder_cached: whether all that is wanted of the encoder sequence, if any, is there.
        miss: why it is no longer; None if all that can be hit of these tokens is.
    """

    blocks: tuple[tuple[KVCacheBlock, ...], ...]
    num_tokens: int
    in_flight: bool
    stops: ChunkStops | None = None
    encoder_cached: bool = True
    miss: PrefixMiss | None = field(default=None, compare=False)
