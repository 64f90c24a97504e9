"""Output rows beside the blocks of requests: which are valid, and their way out and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from prefix_cache.blocks.block import KVCacheBlock
from prefix_cache.blocks.block_hash import BlockHash
from prefix_cache.layer_types.coordinator import KVCacheCoordinator
from prefix_cache.specs.kv_cache_config import KVCacheConfig
from prefix_cache.specs.kv_cache_spec import FullAttentionSpec, HostOnlySpec
from prefix_cache.stores.stage_output_cache import StageOutputCache

__all__ = ["ENCODER_HIDDEN_STATES", "MirroredOutputs", "SavedRows"]

ENCODER_HIDDEN_STATES = "encoder_hidden_states"
"""An output with a row per encoder token; kept only where it is asked for by name."""


@dataclass(frozen=True, slots=True)
class SavedRows:
    """One request's rows in memory of their own.

    Attributes:
        tokens: of its leading tokens, by name.
        encoder: of its encoder sequence, by name; none where that is not mirrored.
    """

    tokens: Mapping[str, Tensor]
    encoder: Mapping[str, Tensor]


class MirroredOutputs:
    """What a model puts out per token, by the slots of the block tables that requests hold.

    Args:
        config: the groups; one must keep all tokens (full attention, or host-only), since its
            blocks are those that outputs are mirrored by.
        coordinator: the block tables, per group.
        names: mirror these tensors only; ``None`` mirrors all that are per token.

    Attributes:
        group_id: the group by whose slots ``stage_outputs`` has its rows.
        stage_outputs: a row per token and tensor.
        encoder_outputs: rows of ``encoder_hidden_states`` by slot of the cross-attention group;
            None if there is no such group, or the name is not asked for.

    Raises:
        ValueError: without a group that keeps all tokens.
    """

    def __init__(
        self, config: KVCacheConfig, coordinator: KVCacheCoordinator, names: Collection[str] | None
    ) -> None:
        self._config = config
        self._coordinator = coordinator
        self.group_id = _first_complete_group(config)
        of_tokens = None if names is None else set(names) - {ENCODER_HIDDEN_STATES}
        self.stage_outputs = self._new_cache(self.group_id, of_tokens)
        self.encoder_outputs: StageOutputCache | None = None
        self._encoder_group_id = -1
        if coordinator.encoder_managers and ENCODER_HIDDEN_STATES in (names or ()):
            self._encoder_group_id = coordinator.encoder_managers[0].group_id
            self.encoder_outputs = self._new_cache(self._encoder_group_id, {ENCODER_HIDDEN_STATES})

    def _new_cache(self, group_id: int, names: Collection[str] | None) -> StageOutputCache:
        return StageOutputCache(
            self._config.num_blocks(group_id),
            self._coordinator.block_size,
            self._coordinator.pool.generations(group_id),
            names,
        )

    @property
    def nbytes_by_name(self) -> dict[str, int]:
        """Bytes reserved for rows, the encoder's included, per mirrored name."""
        encoder = self.encoder_outputs
        own = self.stage_outputs.nbytes_by_name
        return own | (encoder.nbytes_by_name if encoder is not None else {})

    @property
    def nbytes(self) -> int:
        """Bytes reserved for all names."""
        return sum(self.nbytes_by_name.values())

    def num_valid_blocks(self, hit: Sequence[Sequence[KVCacheBlock]]) -> int:
        """Leading blocks of a hit, given per group, of which every wanted row is there."""
        return self.stage_outputs.num_valid_blocks([block.block_id for block in hit[self.group_id]])

    def has_encoder_rows(self, hit: Sequence[Sequence[KVCacheBlock]], num_tokens: int) -> bool:
        """Whether all ``num_tokens`` rows of an encoder sequence are there, or none are wanted."""
        if self.encoder_outputs is None:
            return True
        block_ids = [block.block_id for block in hit[self._encoder_group_id]]
        return self.encoder_outputs.num_valid_rows(block_ids) >= num_tokens

    def blocks_found(self, block_hashes: Set[BlockHash]) -> set[BlockHash]:
        """Those blocks that can be found in the group, which keeps all tokens.

        No prefix is found that ends with one of the others, or behind it.
        """
        return block_hashes & self._coordinator.pool.hash_tables[self.group_id].keys()

    def num_blocks_found(self, block_hashes: Sequence[BlockHash]) -> int:
        """How many of the first blocks can be found in the group."""
        found = self._coordinator.pool.hash_tables[self.group_id]
        return next(
            (i for i, key in enumerate(block_hashes) if key not in found), len(block_hashes)
        )

    def gather(
        self, request_id: str, num_tokens: int, start: int = 0, names: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """Rows ``[start, num_tokens)`` of a request, cached or computed.

        Returns:
            ``(num_tokens - start, *tail)`` per name; see :meth:`StageOutputCache.gather`.

        Raises:
            ValueError: if the request holds no blocks, or too few of them.
        """
        manager, size = self._coordinator.managers[self.group_id], self.stage_outputs.block_size
        num_held = len(manager.table(request_id)) * size
        if not 0 <= start <= num_tokens <= num_held:
            raise ValueError(
                f"rows [{start}, {num_tokens}) were asked for; request {request_id!r} holds blocks "
                f"of {num_held} tokens"
            )
        first = start // size
        block_ids = manager.block_ids(request_id, first, -(-num_tokens // size))
        return self.stage_outputs.gather(
            block_ids, num_tokens - first * size, start=start - first * size, names=names
        )

    def gather_encoder(self, request_id: str, num_tokens: int) -> dict[str, Tensor]:
        """Rows of the request's encoder sequence, ``(num_tokens, width)``, if wanted."""
        if self.encoder_outputs is None:
            return {}
        block_ids = self._block_ids(request_id, self._encoder_group_id)
        return self.encoder_outputs.gather(block_ids, num_tokens)

    def save(self, request_id: str, num_tokens: int) -> SavedRows:
        """Copy the rows of a request's first tokens, and those there are of its encoder."""
        num_encoder_tokens = 0
        if self.encoder_outputs is not None:
            block_ids = self._block_ids(request_id, self._encoder_group_id)
            num_encoder_tokens = self.encoder_outputs.num_valid_rows(block_ids)
        return SavedRows(
            self.gather(request_id, num_tokens), self.gather_encoder(request_id, num_encoder_tokens)
        )

    def restore(self, request_id: str, saved: SavedRows) -> None:
        """Write saved rows to the blocks that the request holds now."""
        self._write(request_id, self.group_id, self.stage_outputs, saved.tokens)
        if self.encoder_outputs is not None:
            self._write(request_id, self._encoder_group_id, self.encoder_outputs, saved.encoder)

    def _write(
        self, request_id: str, group_id: int, to: StageOutputCache, tensors: Mapping[str, Tensor]
    ) -> None:
        blocks = torch.tensor(self._block_ids(request_id, group_id), dtype=torch.int64)
        num_rows = len(next(iter(tensors.values()), ()))
        to.write(to.slots(blocks)[:num_rows], tensors)

    def _block_ids(self, request_id: str, group_id: int) -> list[int]:
        return self._coordinator.managers[group_id].block_ids(request_id)


def _first_complete_group(config: KVCacheConfig) -> int:
    for group_id, group in enumerate(config.groups):
        if isinstance(group.spec, FullAttentionSpec | HostOnlySpec):
            return group_id
    specs = ", ".join(type(group.spec).__name__ for group in config.groups)
    raise ValueError(
        f"outputs are mirrored by a group that keeps all tokens; there are only: {specs}. "
        "Add a group of HostOnlySpec"
    )
