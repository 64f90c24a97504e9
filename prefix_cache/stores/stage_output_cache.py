"""Per-token outputs of a stage, kept on the CPU beside the KV blocks of the same tokens.

A tensor of feature size D is mirrored in a store of ``(num_blocks, block_size, D)``. Flattened to
rows, it takes the slots of the KV cache as they are, so a block table finds a token's outputs as
it finds its keys::

    block 0 (null)      block 1                 block 2
    [ 0   1   2   3 ]   [ 4   5   6   7  ]      [ 8   9  10  11 ]   slot = block * block_size + t
      └ padding           └ row of token 0        └ row of token 4

Eviction needs no policy here: a block that is handed out again gets a new generation, and rows
carry the generation of the block they were written for, so what is left of the old content does
not count as this block's::

    generations   block 1: 7                 tag == generation: the row is this block's
    tags          [ 7   7   3   0 ]          3: an earlier owner's;  0: never written
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _TokenStore:
    """One mirrored tensor.

    Attributes:
        rows: ``(num_blocks * block_size, *tail)``, indexed by slot.
        tags: ``(num_blocks, block_size)`` int64, the generation each row was written for.
    """

    rows: Tensor
    tags: Tensor

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.tags.nbytes


class StageOutputCache:
    """Mirrors every per-token tensor that is written to it.

    Tensors are discovered: what has as many rows as the step has tokens is taken to be per token.
    A tensor of another length is not, and its name is then dropped for good, stored rows included:
    a tensor of one row per *request* has as many rows as tokens in a step that only decodes.

    Args:
        num_blocks: blocks mirrored, the null block included.
        generations: ``(num_blocks,)`` int64 on the CPU, how often each block was handed out; read
            at each call, changed by its owner (:class:`~prefix_cache.blocks.block_pool.BlockPool`).
        names: mirror these only; ``None`` mirrors all.

    Raises:
        ValueError: if ``generations`` is not of the stated form.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        generations: Tensor,
        names: Collection[str] | None = None,
    ) -> None:
        if generations.shape != (num_blocks,) or generations.dtype != torch.int64:
            raise ValueError(
                f"generations must be int64 of shape ({num_blocks},), "
                f"got {generations.dtype} of shape {tuple(generations.shape)}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._generations = generations
        self._offsets = torch.arange(block_size)
        self._restriction = None if names is None else frozenset(names)
        self._stores: dict[str, _TokenStore] = {}
        self._dropped: set[str] = set()

    @property
    def wanted(self) -> frozenset[str]:
        """Names a hit must deliver: those it is restricted to, else all discovered ones.

        Names found not to be per-token tensors are left out: those cannot be cached.
        """
        if self._restriction is None:
            return frozenset(self._stores)
        return self._restriction - self._dropped

    def mirrors(self, name: str) -> bool:
        """Whether a tensor of this name would be kept, as far as is known of it."""
        if name in self._dropped:
            return False
        return self._restriction is None or name in self._restriction

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """``(num_blocks, block_size, *tail)`` per mirrored name."""
        return {
            name: (self.num_blocks, self.block_size, *store.rows.shape[1:])
            for name, store in self._stores.items()
        }

    @property
    def row_types(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Element type and shape of a row, per mirrored name."""
        return {
            name: (store.rows.dtype, tuple(store.rows.shape[1:]))
            for name, store in self._stores.items()
        }

    @property
    def nbytes_by_name(self) -> dict[str, int]:
        """Bytes reserved for rows and tags, per mirrored name."""
        return {name: store.nbytes for name, store in self._stores.items()}

    @property
    def nbytes(self) -> int:
        """Bytes reserved for all names."""
        return sum(self.nbytes_by_name.values())

    @torch.no_grad()
    def write(self, slot_mapping: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Store one step's rows: one scatter per tensor.

        Args:
            slot_mapping: ``(num_tokens,)`` int64 on the CPU, each token's slot. Tokens in the null
                block (padding) are written but never valid.
            tensors: outputs of the step by name, on the CPU; those of ``num_tokens`` rows,
                ``(num_tokens, *tail)``, are mirrored.

        Raises:
            ValueError: if a tensor's row shape or dtype is not what its name had before. Nothing
                is written then.
        """
        num_tokens = slot_mapping.shape[0]
        if num_tokens == 0:
            return
        matched = self._match_stores(num_tokens, tensors)
        if not matched:
            return
        tags = self._generations.index_select(0, slot_mapping.floor_divide(self.block_size))
        for store, rows in matched:
            store.rows.index_copy_(0, slot_mapping, rows)
            store.tags.view(-1).index_copy_(0, slot_mapping, tags)

    def slots(self, blocks: Tensor) -> Tensor:
        """The slots of all rows of some blocks, ``(len(blocks) * block_size,)`` int64."""
        return (blocks[:, None] * self.block_size + self._offsets).view(-1)

    def gather(
        self,
        block_ids: Sequence[int],
        num_tokens: int,
        *,
        start: int = 0,
        names: Collection[str] | None = None,
    ) -> dict[str, Tensor]:
        """Rows ``[start, num_tokens)`` of a sequence, by its block table.

        Args:
            block_ids: the sequence's block table from position 0; may be longer than needed.
            names: tensors wanted; ``None`` means all.

        Returns:
            ``(num_tokens - start, *tail)`` per name, in memory of its own. Only tensors every row
            of which was written for the block that now holds it: a tensor with a stale or missing
            row is absent, never filled up.

        Raises:
            ValueError: if the rows are not within the block table.
        """
        if not 0 <= start <= num_tokens <= len(block_ids) * self.block_size:
            raise ValueError(
                f"rows [{start}, {num_tokens}) are not within {len(block_ids)} blocks "
                f"of {self.block_size} tokens"
            )
        first_block = start // self.block_size
        end_block = -(-num_tokens // self.block_size)
        block_ids = block_ids[first_block:end_block]
        wanted_rows = slice(
            start - first_block * self.block_size, num_tokens - first_block * self.block_size
        )
        # Row by row, not block by block: torch copies wide slices (32,768 elements) on one thread.
        slots = self.slots(torch.tensor(block_ids, dtype=torch.int64))[wanted_rows]
        gathered: dict[str, Tensor] = {}
        for name, store in self._stores.items():
            if names is not None and name not in names:
                continue
            if self._are_valid(store, block_ids)[wanted_rows].all():
                gathered[name] = store.rows.index_select(0, slots)
        return gathered

    def num_valid_rows(self, block_ids: Sequence[int]) -> int:
        """Leading rows of a sequence that are valid in every wanted tensor; none of one unseen."""
        if not block_ids:
            return 0
        num_valid = len(block_ids) * self.block_size
        for name in self.wanted:
            store = self._stores.get(name)
            if store is None:
                return 0
            valid = self._are_valid(store, block_ids)
            if not valid.all():  # as a rule it is
                num_valid = min(num_valid, int(valid.argmin()))
        return num_valid

    def num_valid_blocks(self, block_ids: Sequence[int]) -> int:
        """Leading blocks in which every row is valid; see :meth:`num_valid_rows`."""
        return self.num_valid_rows(block_ids) // self.block_size

    def _are_valid(self, store: _TokenStore, block_ids: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Which rows belong to what their blocks hold now, ``(len(block_ids) * block_size,)``."""
        # The same memory; for so few elements numpy is several times cheaper.
        current = self._generations.numpy()[block_ids][:, None]
        # A block never handed out, the null block among them, has generation 0, like the tag of
        # a row never written: equal, but no block's row.
        valid: npt.NDArray[np.bool_] = (store.tags.numpy()[block_ids] == current) & (current > 0)
        return valid.reshape(-1)

    def _match_stores(
        self, num_tokens: int, tensors: Mapping[str, Tensor]
    ) -> list[tuple[_TokenStore, Tensor]]:
        """Pair each per-token tensor with its store; checks all before any is written."""
        matched: list[tuple[_TokenStore, Tensor]] = []
        for name, tensor in tensors.items():
            if not self.mirrors(name):
                continue
            if tensor.dim() == 0 or tensor.shape[0] != num_tokens:
                self._dropped.add(name)
                self._stores.pop(name, None)
                continue
            store = self._stores.get(name)
            if store is None:
                store = self._stores[name] = self._new_store(tensor)
            elif store.rows.shape[1:] != tensor.shape[1:] or store.rows.dtype != tensor.dtype:
                raise ValueError(
                    f"output {name!r} has rows of shape {tuple(tensor.shape[1:])} and type "
                    f"{tensor.dtype}, but had shape {tuple(store.rows.shape[1:])} and type "
                    f"{store.rows.dtype} before"
                )
            matched.append((store, tensor))
        return matched

    def _new_store(self, like: Tensor) -> _TokenStore:
        num_slots = self.num_blocks * self.block_size
        # A tensor born in inference mode could not be written outside of it later.
        with torch.inference_mode(False):
            # Not zeros: that would touch all of it at once. No row is read before its tag says
            # that it was written.
            rows = torch.empty((num_slots, *like.shape[1:]), dtype=like.dtype)
            tags = torch.zeros((self.num_blocks, self.block_size), dtype=torch.int64)
        return _TokenStore(rows, tags)
