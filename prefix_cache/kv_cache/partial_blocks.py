"""Partial last blocks of finished sequences, found as a whole and copied to continue from there.

A finished request leaves its last block, which is rarely full, under a hash of all its tokens. A
sequence that starts with exactly these tokens continues after the last of them::

    turn 1    | a a a a | b b b b | c c . . |          found by hash(a a a a, b b b b, c c)
    turn 2    | a a a a | b b b b | c c d d | d d . .
                                    a copy: the cached block is unchanged, for others

A hit consists of every group's content at the end of the turn: keys and values of ``c c``, and in
recurrent layers the state after the last token. That state is useless at any other length, so a
sequence hits a partial block only if it has all of its tokens and more.

A page for a fraction of a block's tokens is expensive, and most requests are never continued. So
only a small part of a full pool holds partial blocks, those of the most recently finished requests.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from prefix_cache.blocks.block import BlockHash, KVCacheBlock
from prefix_cache.layer_types.coordinator import KVCacheCoordinator
from prefix_cache.stores.stage_output_cache import StageOutputCache

PartialHash: TypeAlias = Callable[[int], BlockHash | None]
"""Maps a number of leading tokens that ends inside a block to its hash; None: not known yet."""

_MAX_PARENTS = 2**16
_PAGE_RATIO = 32
"""One of this many pages may hold a partial block."""


@dataclass(frozen=True, slots=True)
class PartialHit:
    """Prefix that ends inside a block. Holds no reference.

    Attributes:
        blocks: full blocks per group, as in any hit.
        sources: partial block to copy, per group that follows the tokens.
    """

    num_tokens: int
    blocks: tuple[tuple[KVCacheBlock, ...], ...]
    sources: Mapping[int, KVCacheBlock]
    block_hash: BlockHash

    @property
    def is_current(self) -> bool:
        """True if the partial block is still cached."""
        return all(block.block_hash == self.block_hash for block in self.sources.values())


class PartialBlocks:
    """Partial blocks of one pool, indexed by the full block before them.

    Args:
        rows: mirrored rows; a hit must have all wanted ones.
        rows_group_id: group by whose blocks they are mirrored, which keeps all tokens.
    """

    def __init__(
        self, coordinator: KVCacheCoordinator, rows: StageOutputCache, rows_group_id: int
    ) -> None:
        self._coordinator = coordinator
        self._rows = rows
        self._rows_group_id = rows_group_id
        # By the hash of the last full block, possible numbers of tokens after it.
        self._lengths: OrderedDict[bytes, set[int]] = OrderedDict()
        self._blocks: deque[tuple[KVCacheBlock, BlockHash]] = deque()
        num_pages = len(coordinator.pool.arenas[0].pages)
        self._max_blocks = max(num_pages // _PAGE_RATIO, 2 * len(coordinator.token_managers))

    def publish(
        self,
        request_id: str,
        block_hashes: Sequence[BlockHash],
        block_hash: BlockHash,
        num_tokens: int,
    ) -> None:
        """Make the block findable in which a request's ``num_tokens`` computed tokens end.

        The request must compute nothing more.
        """
        num_full, num_rest = divmod(num_tokens, self._coordinator.block_size)
        pool = self._coordinator.pool
        for manager in self._coordinator.token_managers:
            block = manager.table(request_id)[num_full]
            pool.publish(block, block_hash)
            self._blocks.append((block, block_hash))
        while len(self._blocks) > self._max_blocks:
            pool.forget(*self._blocks.popleft())
        parent = block_hashes[num_full - 1] if num_full else b""
        self._lengths.setdefault(parent, set()).add(num_rest)
        self._lengths.move_to_end(parent)
        if len(self._lengths) > _MAX_PARENTS:
            self._lengths.popitem(last=False)

    def find(
        self,
        block_hashes: Sequence[BlockHash],
        num_hit_tokens: int,
        num_tokens: int,
        partial_hash: PartialHash,
    ) -> PartialHit | None:
        """Find the longest prefix, shorter than ``num_tokens``, that ends inside a block.

        Args:
            num_hit_tokens: length of the hit in whole blocks; shorter prefixes are not searched.
        """
        size = self._coordinator.block_size
        found = self._coordinator.pool.hash_tables[self._rows_group_id]
        first = last = num_hit_tokens // size
        end = min((num_tokens - 1) // size, len(block_hashes))
        while last < end and block_hashes[last] in found:
            last += 1
        for num_full in range(last, first - 1, -1):
            parent = block_hashes[num_full - 1] if num_full else b""
            for num_rest in sorted(self._lengths.get(parent, ()), reverse=True):
                length = num_full * size + num_rest
                block_hash = partial_hash(length) if length < num_tokens else None
                if block_hash is not None and block_hash in found:
                    hit = self._hit([*block_hashes[:num_full], block_hash], length)
                    if hit is not None:
                        return hit
        return None

    def _hit(self, block_hashes: Sequence[BlockHash], num_tokens: int) -> PartialHit | None:
        """Return the hit of exactly these blocks, the last one partial, if every group has it."""
        hits: dict[int, list[KVCacheBlock]] = {}
        for manager in self._coordinator.token_managers:
            first = manager.first_needed_block(num_tokens)
            found = manager.pool.lookup_all(manager.group_id, block_hashes[first:])
            if found is None:
                return None
            hits[manager.group_id] = [manager.null_block] * first + found
        row_blocks = [block.block_id for block in hits[self._rows_group_id]]
        if self._rows.num_valid_rows(row_blocks) < num_tokens:
            return None
        return PartialHit(
            num_tokens,
            tuple(tuple(hits.get(m.group_id, ())[:-1]) for m in self._coordinator.managers),
            {group_id: blocks[-1] for group_id, blocks in hits.items()},
            block_hashes[-1],
        )
