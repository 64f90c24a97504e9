"""Per-token outputs of a stage, stored on the CPU under the KV block ids of the same tokens.

A tensor of feature size D is mirrored in a store of ``(num_blocks, block_size, D)``. Flattened to
rows, it uses the slots of the KV cache unchanged, so a block table locates a token's outputs the
same way as its keys::

    block 0 (null)      block 1                 block 2
    [ 0   1   2   3 ]   [ 4   5   6   7  ]      [ 8   9  10  11 ]   slot = block * block_size + t
      └ padding           └ row of token 0        └ row of token 4

Eviction needs no policy here. A block gets a new generation each time it is allocated, and each row
is tagged with the generation of the block it was written for, so leftover rows of the old content
are invalid::

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
    """Mirror of every per-token tensor that is written to it.

    Tensors are discovered: one with as many rows as the step has tokens is assumed to be per token.
    A tensor of another length is not, and its name is then dropped permanently with its stored
    rows, because a tensor with one row per *request* matches in a step that only decodes.

    Args:
        num_blocks: number of mirrored blocks, including the null block.
        generations: ``(num_blocks,)`` int64 on the CPU, how often each block was allocated; read at
            each call, changed by its owner (:class:`~prefix_cache.blocks.block_pool.BlockPool`).
        names: mirror these only; ``None`` mirrors all.

    Raises:
        ValueError: if ``generations`` has another shape or dtype.
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
        """Names that a hit must provide: the configured ones, else all discovered ones.

        Names of tensors that turned out not to be per token are excluded, as they cannot be cached.
        """
        if self._restriction is None:
            return frozenset(self._stores)
        return self._restriction - self._dropped

    def mirrors(self, name: str) -> bool:
        """Return True if a tensor of this name would be stored, as far as known so far."""
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
        """Store one step's rows, with one scatter per tensor.

        Args:
            slot_mapping: ``(num_tokens,)`` int64 on the CPU, each token's slot. Tokens in the null
                block (padding) are written but never valid.
            tensors: outputs of the step by name, on the CPU; those with ``num_tokens`` rows,
                ``(num_tokens, *tail)``, are mirrored.

        Raises:
            ValueError: if a tensor's row shape or dtype differs from earlier ones of its name.
                Nothing is written then.
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
        """Return the slots of all rows of some blocks, ``(len(blocks) * block_size,)`` int64."""
        return (blocks[:, None] * self.block_size + self._offsets).view(-1)

    def gather(
        self,
        block_ids: Sequence[int],
        num_tokens: int,
        *,
        start: int = 0,
        names: Collection[str] | None = None,
    ) -> dict[str, Tensor]:
        """Gather rows ``[start, num_tokens)`` of a sequence by its block table.

        Args:
            block_ids: the sequence's block table from position 0; may be longer than needed.
            names: names of the tensors to gather; ``None`` means all.

        Returns:
            ``(num_tokens - start, *tail)`` per name, newly allocated. Contains only tensors whose
            every row was written for the current owner of its block: a tensor with a stale or
            missing row is absent, never padded.

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
        """Return the number of leading rows valid in every wanted tensor; 0 if one is unseen."""
        if not block_ids:
            return 0
        num_valid = len(block_ids) * self.block_size
        for name in self.wanted:
            store = self._stores.get(name)
            if store is None:
                return 0
            valid = self._are_valid(store, block_ids)
            if not valid.all():  # usually all are
                num_valid = min(num_valid, int(valid.argmin()))
        return num_valid

    def num_valid_blocks(self, block_ids: Sequence[int]) -> int:
        """Return the number of leading blocks with valid rows only; see :meth:`num_valid_rows`."""
        return self.num_valid_rows(block_ids) // self.block_size

    def _are_valid(self, store: _TokenStore, block_ids: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Return a mask of rows of the current generation, ``(len(block_ids) * block_size,)``."""
        # A numpy view, because numpy is several times cheaper for so few elements.
        current = self._generations.numpy()[block_ids][:, None]
        # A block that was never allocated, such as the null block, has generation 0, which equals
        # the tag of a row that was never written, but is not valid.
        valid: npt.NDArray[np.bool_] = (store.tags.numpy()[block_ids] == current) & (current > 0)
        return valid.reshape(-1)

    def _match_stores(
        self, num_tokens: int, tensors: Mapping[str, Tensor]
    ) -> list[tuple[_TokenStore, Tensor]]:
        """Pair each per-token tensor with its store; check all before any is written."""
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
        # A tensor created in inference mode could not be written outside of it later.
        with torch.inference_mode(False):
            # Not zeros, which would touch all of the memory at once. No row is read before its tag
            # marks it as written.
            rows = torch.empty((num_slots, *like.shape[1:]), dtype=like.dtype)
            tags = torch.zeros((self.num_blocks, self.block_size), dtype=torch.int64)
        return _TokenStore(rows, tags)
