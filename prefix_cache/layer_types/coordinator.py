"""Managers of the KV-cache groups, kept in step: a request has block tables in all or none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from prefix_cache.blocks.block import BlockHash, KVCacheBlock, LargePage
from prefix_cache.blocks.block_pool import HIGH_PRIORITY, LOW_PRIORITY, BlockPool
from prefix_cache.specs.kv_cache_spec import (
    CrossAttentionSpec,
    FullAttentionSpec,
    HostOnlySpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

_NONE: Mapping[int, KVCacheBlock] = MappingProxyType({})

NEVER = 2**62
"""Number of tokens that no request reaches."""


class SingleTypeKVCacheManager(ABC):
    """Manager of one block table per request, for the layers of one group.

    Index ``position // block_size`` of a table is the block of a position; the null block fills
    positions whose block is not needed (any more). Subclasses, one per layer type, define which
    blocks a hit needs, which a request still needs (all by default), and what is evicted first.

    Args:
        max_num_batched_tokens: maximum number of tokens of a request in one step.

    Attributes:
        block_tables: request id to its blocks; read-only.
        follows_tokens: true if the group's blocks hold the request's tokens; if false
            (cross-attention), token prefixes do not apply to it.
        keeps_all: true if a hit needs all blocks from the start.
        keeps_states: true if a hit needs a state stored exactly at its end (recurrent layers).
    """

    follows_tokens: ClassVar[bool] = True
    keeps_all: ClassVar[bool] = False
    keeps_states: ClassVar[bool] = False

    def __init__(
        self, spec: KVCacheSpec, pool: BlockPool, group_id: int, max_num_batched_tokens: int
    ) -> None:
        self.spec = spec
        self.pool = pool
        self.group_id = group_id
        self.block_size = spec.block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.null_block = pool.null_block(group_id)
        self.block_tables: dict[str, list[KVCacheBlock]] = {}
        # Leading blocks per request whose content is final: adopted or already published.
        self._num_published: dict[str, int] = {}
        # Leading blocks per request that came from a hit: other requests likely need them again.
        self._num_adopted: dict[str, int] = {}
        # Per request, range of blocks that others need to continue where it diverges from them.
        self.divergence: dict[str, tuple[int, int]] = {}
        # Released blocks of these ranges and of hits, with their hashes at that time.
        self._shared: dict[str, list[tuple[KVCacheBlock, BlockHash]]] = {}
        # Leading blocks per request that were already released or never held.
        self._num_released: dict[str, int] = {}

    @abstractmethod
    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_num_tokens: int
    ) -> list[KVCacheBlock]:
        """Find the blocks of the longest cached prefix that this group alone can serve.

        Changes nothing and adds no reference: valid until the next allocation, publication, reset.

        Args:
            block_hashes: hashes of the sequence's full blocks, from its start.
            max_num_tokens: maximum length of the hit (rounded down to whole blocks).

        Returns:
            One block per ``block_size`` tokens of the hit; the null block where none is needed.
        """

    def max_blocks(self, num_tokens: int) -> int:
        """Return the maximum number of blocks that a request of ``num_tokens`` holds at once."""
        return -(-num_tokens // self.block_size)

    def first_needed_block(self, num_computed_tokens: int) -> int:
        """Return the index of the first block that the remaining tokens can need."""
        return 0

    def next_release(self, num_computed_tokens: int) -> int:
        """Return the number of computed tokens at which :meth:`first_needed_block` next changes.

        ``NEVER`` if it does not change.
        """
        return NEVER

    def num_blocks_needed(
        self, request_id: str, num_tokens: int, num_prefix_blocks: int = 0
    ) -> int:
        """Return how many blocks the request's table lacks for ``num_tokens``. Changes nothing.

        Args:
            request_id: an unknown request has an empty table.
            num_tokens: total number of tokens, including computed ones.
            num_prefix_blocks: blocks of a hit that the request would adopt first.
        """
        num_held = len(self.block_tables.get(request_id, ())) + num_prefix_blocks
        return max(0, -(-num_tokens // self.block_size) - num_held)

    def num_blocks_to_finish(self, num_tokens: int, num_prefix_tokens: int) -> int:
        """Return the maximum number of new blocks held at once between prefix and end."""
        num_new = -(-num_tokens // self.block_size) - num_prefix_tokens // self.block_size
        return max(0, min(num_new, self.max_blocks(num_tokens)))

    def extend(self, request_id: str, blocks: Sequence[KVCacheBlock], num_tokens: int) -> None:
        """Append new blocks, as many as :meth:`num_blocks_needed` returned, to the table."""
        self._begin(request_id)
        self.block_tables[request_id].extend(blocks)

    def publish(
        self, request_id: str, block_hashes: Sequence[BlockHash], num_computed_tokens: int
    ) -> None:
        """Make full, computed blocks findable. Call it after the step that wrote them.

        Each block is published once, when its last token is computed.

        Args:
            block_hashes: hashes of the request's full blocks, from its start; extra ones are fine.
        """
        table = self.table(request_id)
        first = self._num_published[request_id]
        end = min(num_computed_tokens // self.block_size, len(block_hashes), len(table))
        for index in range(first, end):
            if table[index] is not self.null_block:
                self.pool.publish(table[index], block_hashes[index])
        self._num_published[request_id] = max(first, end)

    def release_unneeded(self, request_id: str, num_computed_tokens: int) -> None:
        """Release the blocks that no later token of the request can need.

        Their content gets low priority, because only a hit that ends at the same position could
        use it. Exceptions are blocks from a hit and blocks where the request diverges from others.
        """
        table = self.block_tables.get(request_id)
        if table is None:
            return
        end = min(self.first_needed_block(num_computed_tokens), len(table))
        first = self._num_released[request_id]
        if end <= first:
            return
        begin, stop = self.divergence.get(request_id, (0, 0))
        adopted = self._num_adopted.get(request_id, 0)
        for index in range(first, end):
            if index < adopted or begin <= index < stop:
                self._release_shared(request_id, table[index])
            else:
                self.pool.release(table[index : index + 1], LOW_PRIORITY)
        table[first:end] = [self.null_block] * (end - first)
        self._num_released[request_id] = end

    def _release_shared(self, request_id: str, block: KVCacheBlock) -> None:
        """Release a block that others need in addition to those that the request still holds.

        It counts as used until the request ends, because neither is useful without the other.
        """
        if block is self.null_block:
            return
        if block.block_hash is not None:
            self._shared.setdefault(request_id, []).append((block, block.block_hash))
        self.pool.release([block], HIGH_PRIORITY)

    def adopt(self, request_id: str, blocks: Sequence[KVCacheBlock]) -> None:
        """Start a request's table with the blocks of a hit, adding one reference to each.

        Raises:
            ValueError: if the request already has a table, or a block has lost its content.
        """
        if request_id in self.block_tables:
            raise ValueError(f"request {request_id!r} has a block table already")
        for block in blocks:
            if block is not self.null_block:
                self.pool.touch(block)
        self.block_tables[request_id] = list(blocks)
        self._num_published[request_id] = self._num_adopted[request_id] = len(blocks)
        self._num_released[request_id] = 0

    def free(self, request_id: str) -> None:
        """Release all blocks of a request, tail first, and forget it. ``ValueError`` if unknown.

        Published blocks stay findable until they are evicted.
        """
        table = self.table(request_id)
        del self.block_tables[request_id]
        del self._num_published[request_id], self._num_released[request_id]
        self._num_adopted.pop(request_id, None)
        self.divergence.pop(request_id, None)
        self.pool.release(reversed(table))
        for block, block_hash in self._shared.pop(request_id, ()):
            self.pool.renew(block, block_hash)

    def block_ids(self, request_id: str, first: int = 0, end: int | None = None) -> list[int]:
        """Return the ids of blocks ``[first, end)`` of a request. ``ValueError`` if unknown."""
        return [block.block_id for block in self.table(request_id)[first:end]]

    def restore(self, request_id: str, blocks: Sequence[KVCacheBlock]) -> None:
        """Start a request's table with blocks held for it whose content was restored.

        They become findable with the next call of :meth:`publish`.

        Raises:
            ValueError: if the request already has a table.
        """
        if request_id in self.block_tables:
            raise ValueError(f"request {request_id!r} has a block table already")
        self._begin(request_id)
        self.block_tables[request_id] = list(blocks)

    def last_page(self, request_id: str) -> LargePage | None:
        """Return the large page of the request's last block, preferred for new blocks."""
        table = self.block_tables.get(request_id)
        return table[-1].large_page if table else None

    def _begin(self, request_id: str) -> None:
        if request_id not in self.block_tables:
            self.block_tables[request_id] = []
            self._num_published[request_id] = 0
            self._num_released[request_id] = 0

    def table(self, request_id: str) -> Sequence[KVCacheBlock]:
        """Return the blocks of a request, null blocks too; read-only. ``ValueError`` if unknown."""
        table = self.block_tables.get(request_id)
        if table is None:
            raise ValueError(f"request {request_id!r} holds no blocks")
        return table


class FullAttentionManager(SingleTypeKVCacheManager):
    """Manager that keeps every block of a request; every prefix of a hit is a hit.

    It also serves host-only groups, whose block ids locate the outputs of every token.
    """

    keeps_all = True

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_num_tokens: int
    ) -> list[KVCacheBlock]:
        """Scan from the left up to the first block that is not cached."""
        hit: list[KVCacheBlock] = []
        for block_hash in block_hashes[: max_num_tokens // self.block_size]:
            block = self.pool.lookup(self.group_id, block_hash)
            if block is None:
                break
            hit.append(block)
        return hit


class CrossAttentionManager(SingleTypeKVCacheManager):
    """Manager of static tables over encoder tokens, filled once, without token prefixes.

    ``num_tokens`` means encoder tokens in all methods of this class.
    """

    follows_tokens = False

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_num_tokens: int
    ) -> list[KVCacheBlock]:
        """Find all blocks or none, because a partial encoder output is useless.

        Args:
            block_hashes: hashes of all blocks of the encoder's input, including a partial last one.
            max_num_tokens: number of encoder tokens.
        """
        blocks = self.pool.lookup_all(self.group_id, block_hashes) or []
        return blocks if len(blocks) == self.max_blocks(max_num_tokens) else []

    def publish(
        self, request_id: str, block_hashes: Sequence[BlockHash], num_computed_tokens: int
    ) -> None:
        """Make the whole table findable, including its partial last block."""
        table = self.table(request_id)
        if self._num_published[request_id] or len(block_hashes) != len(table):
            return
        for block, block_hash in zip(table, block_hashes, strict=True):
            self.pool.publish(block, block_hash)
        self._num_published[request_id] = len(table)


class SlidingWindowManager(SingleTypeKVCacheManager):
    """Manager that keeps the blocks in the next token's window and releases earlier ones.

    A token attends to the last ``spec.window`` tokens, itself included.

    A hit needs only the blocks in the window of the token after it. With window 6, blocks of 4 and
    a hit of 12 tokens, token 12 attends to 7 to 12, which are in blocks 1 and 2::

        block   | 0       | 1       | 2       |
        tokens  | 0 1 2 3 | 4 5 6 7 | 8 9 . . | 12
        hit     | null    | cached  | cached  |
    """

    spec: SlidingWindowSpec

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_num_tokens: int
    ) -> list[KVCacheBlock]:
        """Search from the end; a missing block rules out every hit whose window includes it."""
        end = min(max_num_tokens // self.block_size, len(block_hashes))
        while end > 0:
            first = self.first_needed_block(end * self.block_size)
            hit: list[KVCacheBlock] = []
            for index in reversed(range(first, end)):
                block = self.pool.lookup(self.group_id, block_hashes[index])
                if block is None:
                    break
                hit.append(block)
            if len(hit) == end - first:
                return [self.null_block] * first + hit[::-1]
            # The block before those found is missing, so no hit can include it.
            end -= len(hit) + 1
        return []

    def max_blocks(self, num_tokens: int) -> int:
        """Return how many blocks a step's tokens and the first one's window can span."""
        span = self.spec.window - 1 + self.max_num_batched_tokens
        spread = (span + self.block_size - 2) // self.block_size + 1
        return min(-(-num_tokens // self.block_size), spread)

    def first_needed_block(self, num_computed_tokens: int) -> int:
        """Return the block of the first token in the next token's window."""
        return max(0, num_computed_tokens - self.spec.window + 1) // self.block_size

    def next_release(self, num_computed_tokens: int) -> int:
        """Return the number of computed tokens at which the window leaves its first block."""
        next_block = self.first_needed_block(num_computed_tokens) + 1
        return next_block * self.block_size + self.spec.window - 1


class MambaManager(SingleTypeKVCacheManager):
    """Manager of recurrent states: a page holds the state after a token, in that token's block.

    Within a block, the state is overwritten in place. A step that ends beyond that block writes
    to a new page, and the old one can be released: if its block was full, it is the state after
    the block's last token and stays findable under the block's hash. Blocks of 4, steps of 6, 2, 1
    and 4 tokens::

        after token   table              findable
        6             -  A               nothing (the step ended inside block 1)
        8             -  A               A, for a prefix of 8 tokens
        9             -  A  B            A; released by the next step
        13            -  -  B  C         A; B is lost, as it never was the state after a full block

    A hit needs a state stored exactly at its end, so prefill steps should end where hits are
    likely; see :meth:`keep`. Other states have low priority, except the request's latest.
    """

    keeps_states = True

    def __init__(
        self, spec: KVCacheSpec, pool: BlockPool, group_id: int, max_num_batched_tokens: int
    ) -> None:
        super().__init__(spec, pool, group_id, max_num_batched_tokens)
        # Per request, indices of blocks whose state is more valuable than an intermediate one.
        self._kept: dict[str, frozenset[int]] = {}
        # Per request, the last released state, with its hash at that time.
        self._latest: dict[str, tuple[KVCacheBlock, BlockHash]] = {}

    def keep(self, request_id: str, ends: Sequence[int]) -> None:
        """Mark the numbers of tokens (whole blocks) after which to keep a request's states."""
        kept = {end // self.block_size - 1 for end in ends}
        self._kept[request_id] = self._kept.get(request_id, frozenset()) | kept

    def adopt(self, request_id: str, blocks: Sequence[KVCacheBlock]) -> None:
        """See the base class; keeps the state of a hit, because it is likely to be shared again."""
        super().adopt(request_id, blocks)
        self._kept[request_id] = frozenset({len(blocks) - 1})

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_num_tokens: int
    ) -> list[KVCacheBlock]:
        """Find the last block with a stored state; earlier ones are not needed."""
        end = min(max_num_tokens // self.block_size, len(block_hashes))
        for index in reversed(range(end)):
            block = self.pool.lookup(self.group_id, block_hashes[index])
            if block is not None:
                return [self.null_block] * index + [block]
        return []

    def max_blocks(self, num_tokens: int) -> int:
        """Return at most 2: the state that a step reads and the one that it writes."""
        return min(-(-num_tokens // self.block_size), 2)

    def first_needed_block(self, num_computed_tokens: int) -> int:
        """Return the block of the last computed token, whose state the request continues from."""
        return max(0, num_computed_tokens - 1) // self.block_size

    def next_release(self, num_computed_tokens: int) -> int:
        """Return the number of computed tokens after the first token of the next block."""
        return (self.first_needed_block(num_computed_tokens) + 1) * self.block_size + 1

    def num_blocks_needed(
        self, request_id: str, num_tokens: int, num_prefix_blocks: int = 0
    ) -> int:
        """Return 1 if the last token is beyond the table, else 0."""
        return min(1, super().num_blocks_needed(request_id, num_tokens, num_prefix_blocks))

    def extend(self, request_id: str, blocks: Sequence[KVCacheBlock], num_tokens: int) -> None:
        """Append the new page as the last token's block; blocks in between have no state."""
        self._begin(request_id)
        if blocks:
            table = self.block_tables[request_id]
            skipped = -(-num_tokens // self.block_size) - len(table) - 1
            table.extend([self.null_block] * skipped)
            table.extend(blocks)

    def publish(
        self, request_id: str, block_hashes: Sequence[BlockHash], num_computed_tokens: int
    ) -> None:
        """Publish the state if the step ended at a block boundary; others cannot serve a hit."""
        end, rest = divmod(num_computed_tokens, self.block_size)
        table = self.table(request_id)
        is_new = self._num_published[request_id] < end <= min(len(block_hashes), len(table))
        if rest == 0 and is_new and table[end - 1] is not self.null_block:
            self.pool.publish(table[end - 1], block_hashes[end - 1])
        self._num_published[request_id] = max(self._num_published[request_id], end)

    def free(self, request_id: str) -> None:
        """See the base class; the next turn of a conversation continues from the last state."""
        if any(block.block_hash is not None for block in self.table(request_id)):
            self._demote_latest(request_id)  # the table has a later one
        super().free(request_id)
        self._kept.pop(request_id, None)
        self._latest.pop(request_id, None)

    def release_unneeded(self, request_id: str, num_computed_tokens: int) -> None:
        """Release the states that the request no longer needs.

        The last state at the end of a block is where the next turn of a conversation would
        continue. Once there is a later one its priority is low, unless it is marked to be kept.
        """
        table = self.block_tables.get(request_id)
        if table is None:
            return
        end = min(self.first_needed_block(num_computed_tokens), len(table))
        first, kept = self._num_released[request_id], self._kept.get(request_id, ())
        for index in range(first, end):
            block, block_hash = table[index], table[index].block_hash
            if block is self.null_block:
                continue
            if index in kept:
                self._release_shared(request_id, block)
            else:
                self.pool.release([block], HIGH_PRIORITY)
            if block_hash is not None:
                self._demote_latest(request_id)
                if index not in kept:
                    self._latest[request_id] = (block, block_hash)
        table[first:end] = [self.null_block] * max(0, end - first)
        self._num_released[request_id] = max(first, end)

    def _demote_latest(self, request_id: str) -> None:
        block, block_hash = self._latest.pop(request_id, (self.null_block, None))
        if block_hash is not None and block.block_hash == block_hash:
            self.pool.demote(block)


@dataclass(frozen=True, slots=True)
class ChunkStops:
    """Chunk ends for models whose layers keep states.

    A state is available only after the last token of a step. A request of 20 tokens in blocks of
    4, which shares its first 12 with another request, with a budget of 10 tokens per step::

        tokens  | 0 . . . . . . . | 8 . . . | 12 . . . | 16 . . . |
        chunks  | 8               | 4       | 4        | 4        |
                  whole blocks      shared    last whole block that leaves a token to run

    Attributes:
        block_size: tokens per block; states are stored at the ends of blocks.
        ends: numbers of tokens (whole blocks) after which a chunk must end.
    """

    block_size: int
    ends: tuple[int, ...]

    def clip(self, start: int, num_tokens: int, total: int) -> int:
        """Return how many of ``num_tokens`` tokens from ``start`` on to run now, at least 1.

        Args:
            start: number of computed tokens.
            num_tokens: number of tokens that the budget allows.
            total: tokens of the sequence so far; a chunk that ends before it ends with a block.
        """
        end = start + num_tokens
        if end < total:
            whole = end // self.block_size * self.block_size
            end = whole if whole > start else end
        return min([end, *(stop for stop in self.ends if stop > start)]) - start


MANAGER_TYPES: dict[type[KVCacheSpec], type[SingleTypeKVCacheManager]] = {
    FullAttentionSpec: FullAttentionManager,
    SlidingWindowSpec: SlidingWindowManager,
    MambaSpec: MambaManager,
    CrossAttentionSpec: CrossAttentionManager,
    HostOnlySpec: FullAttentionManager,
}
"""Manager type per spec type."""

Hit = tuple[tuple[KVCacheBlock, ...], ...]


class KVCacheCoordinator:
    """Coordinator of the managers of one engine's KV-cache groups.

    Args:
        config: the groups, all with the same block size, because hashes depend on it.

    Attributes:
        token_managers: managers of the groups that follow the tokens.
        stops: chunk ends of the prefill, per request whose states are kept.

    Raises:
        NotImplementedError: for a spec without a manager, or block sizes that differ.
    """

    def __init__(self, config: KVCacheConfig, pool: BlockPool, max_num_batched_tokens: int) -> None:
        self.pool = pool
        block_sizes = {group.spec.block_size for group in config.groups}
        if len(block_sizes) > 1:
            raise NotImplementedError(
                f"all KV-cache groups must have one block size, got {sorted(block_sizes)}"
            )
        self.block_size = block_sizes.pop()
        self.managers = tuple(
            _manager_type(group.spec)(group.spec, pool, group_id, max_num_batched_tokens)
            for group_id, group in enumerate(config.groups)
        )
        self.state_managers = [m for m in self.managers if isinstance(m, MambaManager)]
        self.encoder_managers = [m for m in self.managers if not m.follows_tokens]
        self.token_managers = [m for m in self.managers if m.follows_tokens]
        # Per request, the capacity of its tables in tokens, and the number of computed tokens at
        # which blocks can be released. Below both, as in most decode steps, there is nothing to do.
        self._settled: dict[str, tuple[int, int]] = {}
        self.stops: dict[str, ChunkStops] = {}

    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_num_tokens: int) -> Hit:
        """Find the longest prefix that every group can serve.

        The search repeats with the shortest hit as the limit until all groups agree, because a
        group's hit at one length does not imply one at a shorter length (a sliding window needs
        its last blocks only). Changes nothing; valid as long as the managers' results are.

        Returns:
            Equally many blocks per group that follows the tokens; null where none is needed.
        """
        hits: dict[int, list[KVCacheBlock]] = {}
        while self.token_managers:
            hits = {
                m.group_id: m.find_longest_cache_hit(block_hashes, max_num_tokens)
                for m in self.token_managers
            }
            lengths = set(map(len, hits.values()))
            if len(lengths) == 1:
                break
            max_num_tokens = min(lengths) * self.block_size
        return tuple([tuple(hits.get(m.group_id, ())) for m in self.managers])

    def lacking_group(self, block_hashes: Sequence[BlockHash]) -> int | None:
        """Return the first group that prevents a hit of all these blocks, or None."""
        num_tokens = len(block_hashes) * self.block_size
        for manager in self.token_managers:
            hit = manager.find_longest_cache_hit(block_hashes, num_tokens)
            if len(hit) < len(block_hashes):
                return manager.group_id
        return None

    def needs(
        self,
        request_id: str,
        num_tokens: int,
        prefix_blocks: Sequence[Sequence[KVCacheBlock]] = (),
        *,
        sources: Mapping[int, KVCacheBlock] = _NONE,
        num_computed_tokens: int = 0,
        num_encoder_tokens: int = 0,
    ) -> dict[int, int]:
        """Return how many blocks :meth:`allocate` would allocate per group; frees unneeded ones."""
        needs: dict[int, int] = {}
        for manager in self.managers:
            manager.release_unneeded(request_id, num_computed_tokens)
            num_prefix = len(prefix_blocks[manager.group_id]) if prefix_blocks else 0
            wanted = num_tokens if manager.follows_tokens else num_encoder_tokens
            copies = int(manager.group_id in sources)
            needed = manager.num_blocks_needed(request_id, wanted, num_prefix + copies)
            needs[manager.group_id] = copies + needed
        return needs

    def allocate(
        self,
        request_id: str,
        num_tokens: int,
        prefix_blocks: Sequence[Sequence[KVCacheBlock]] = (),
        *,
        sources: Mapping[int, KVCacheBlock] = _NONE,
        num_computed_tokens: int = 0,
        num_encoder_tokens: int = 0,
    ) -> bool:
        """Adopt the prefix and grow all tables to ``num_tokens``, or change no table's length.

        Returns False if there are too few blocks. In either case, blocks that no token after the
        computed ones can need are released first. ``sources`` maps a group to the block that is to
        be copied to the one after the prefix.
        """
        num_held, next_release = self._settled.get(request_id, (-1, 0))
        if num_computed_tokens >= next_release:
            for manager in self.managers:
                manager.release_unneeded(request_id, num_computed_tokens)
            next_release = min([m.next_release(num_computed_tokens) for m in self.managers])
        if num_tokens <= num_held:
            self._settled[request_id] = (num_held, next_release)
            return True
        needs = self.needs(
            request_id,
            num_tokens,
            prefix_blocks,
            sources=sources,
            num_computed_tokens=num_computed_tokens,
            num_encoder_tokens=num_encoder_tokens,
        )
        if not self.pool.can_allocate(needs, (*prefix_blocks, tuple(sources.values()))):
            return False
        # Adopt in every group first: a new block of one must not evict the prefix of another.
        for manager, blocks in zip(self.managers, prefix_blocks, strict=False):
            manager.adopt(request_id, blocks)
        for source in sources.values():
            self.pool.touch(source)
        near = {m.group_id: m.last_page(request_id) for m in self.managers if needs[m.group_id]}
        blocks_of = self.pool.allocate(needs, near) if near else {}
        # Low priority: requests that continue from the copy later find its full block.
        self.pool.release(sources.values(), LOW_PRIORITY)
        for manager in self.managers:
            blocks = blocks_of.get(manager.group_id, [])
            if manager.group_id in sources:
                num_held = len(prefix_blocks[manager.group_id]) + 1
                manager.extend(request_id, blocks[:1], num_held * self.block_size)
                blocks = blocks[1:]
            manager.extend(request_id, blocks, num_tokens)
        num_held = -(-num_tokens // self.block_size) * self.block_size
        self._settled[request_id] = (num_held, next_release)
        return True

    def record_divergence(
        self, request_id: str, block_hashes: Sequence[BlockHash], hit_tokens: int, seen_tokens: int
    ) -> None:
        """Record how much a request shares with earlier ones, if the hit does not cover all of it.

        Each missing block is weighted by the number of blocks that it made the hit shorter.

        Args:
            seen_tokens: tokens that are, or recently were, cached in the groups that keep all.
        """
        num_hit, num_seen = hit_tokens // self.block_size, seen_tokens // self.block_size
        num_found = num_seen
        for manager in self.token_managers:
            first = manager.first_needed_block(num_seen * self.block_size)
            manager.divergence[request_id] = first, num_seen
            if not manager.keeps_all:
                continue
            missing = self._missing(manager.group_id, block_hashes, range(num_hit, num_seen))
            for index in missing:
                self.pool.miss(manager.group_id, block_hashes[index], 1.0)
            num_found = min([num_found, *missing])
        if num_found == num_hit:
            return
        for manager in self.token_managers:
            if not manager.keeps_all:
                first = manager.first_needed_block(num_found * self.block_size)
                missing = self._missing(manager.group_id, block_hashes, range(first, num_found))
                for index in missing:
                    weight = (num_found - num_hit) / len(missing)
                    self.pool.miss(manager.group_id, block_hashes[index], weight)

    def _missing(self, group_id: int, block_hashes: Sequence[BlockHash], at: range) -> list[int]:
        return [index for index in at if self.pool.lookup(group_id, block_hashes[index]) is None]

    def keep_stops(self, request_id: str, stops: ChunkStops | None) -> None:
        """Store the chunk ends of a request's prefill, where states are kept."""
        if stops is None:
            return
        self.stops[request_id] = stops
        for manager in self.state_managers:
            manager.keep(request_id, stops.ends)

    def max_blocks(self, num_tokens: int, num_encoder_tokens: int = 0) -> dict[int, int]:
        """Return, per group, the maximum blocks that a request of ``num_tokens`` holds at once."""
        return {
            m.group_id: m.max_blocks(num_tokens if m.follows_tokens else num_encoder_tokens)
            for m in self.managers
        }

    def publish(
        self, request_id: str, block_hashes: Sequence[BlockHash], num_computed_tokens: int
    ) -> None:
        """Make full, computed blocks findable in every group that follows the tokens."""
        for manager in self.token_managers:
            manager.publish(request_id, block_hashes, num_computed_tokens)

    def free(self, request_id: str) -> None:
        """Release the request's blocks in every group. ``ValueError`` if it is unknown."""
        self._settled.pop(request_id, None)
        self.stops.pop(request_id, None)
        for manager in self.managers:
            manager.free(request_id)


def _manager_type(spec: KVCacheSpec) -> type[SingleTypeKVCacheManager]:
    manager_type = MANAGER_TYPES.get(type(spec))
    if manager_type is None:
        known = ", ".join(spec_type.__name__ for spec_type in MANAGER_TYPES)
        raise NotImplementedError(f"no manager for {type(spec).__name__}; there are: {known}")
    return manager_type
