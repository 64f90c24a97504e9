"""What one layer keeps per token, and how layers that keep the same thing form a group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

__all__ = ["FullAttentionSpec", "KVCacheConfig", "KVCacheGroup", "KVCacheSpec", "group_layers"]


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What every layer of a group keeps: the base of one spec per layer type.

    Attributes:
        block_size: tokens per block (and per small page).
    """

    block_size: int

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")

    @property
    def layer_page_bytes(self) -> int:
        """Bytes that one layer needs for one block."""
        raise NotImplementedError(f"{type(self).__name__} states no page size")


@dataclass(frozen=True, slots=True)
class FullAttentionSpec(KVCacheSpec):
    """Causal attention over everything before: keys and values of all tokens are kept.

    Attributes:
        num_kv_heads: heads of K and V after grouping (GQA).
        head_dim: elements per head.
        dtype: element type of the stored keys and values.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def layer_page_bytes(self) -> int:
        """``2 (K, V) * block_size * num_kv_heads * head_dim * itemsize``."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers of one spec: they share one block table, and one small page holds all of them.

    Attributes:
        layer_names: in the order in which the layers lie inside a page.
        spec: what each of these layers keeps.
    """

    layer_names: tuple[str, ...]
    spec: KVCacheSpec

    @property
    def page_bytes(self) -> int:
        """Bytes of one small page: ``block_size`` tokens of all layers of the group."""
        return len(self.layer_names) * self.spec.layer_page_bytes


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The geometry of one engine's cache.

    Attributes:
        num_blocks: blocks in the pool, the null block (id 0) included.
        groups: one entry per layer type; their index is the ``group_id`` everywhere.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]

    def __post_init__(self) -> None:
        if self.num_blocks < 2:
            raise ValueError(
                f"num_blocks must be at least 2 (block 0 is the null block), got {self.num_blocks}"
            )
        if not self.groups:
            raise ValueError("a KV cache needs at least one group of layers, got none")


def group_layers(layer_specs: Mapping[str, KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Group layers of equal spec, in order of first appearance.

    Args:
        layer_specs: layer name to what that layer keeps, in the order of the model's layers.
    """
    by_spec: dict[KVCacheSpec, list[str]] = {}
    for name, spec in layer_specs.items():
        by_spec.setdefault(spec, []).append(name)
    return tuple(KVCacheGroup(tuple(names), spec) for spec, names in by_spec.items())
