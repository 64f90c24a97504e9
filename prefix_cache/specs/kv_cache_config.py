"""Groups of layers, and the page sizes that let all groups share one buffer.

Every group has pages of its own size; the buffer is cut into large pages of their least common
multiple, so that a large page serves any group whole. Two cross-attention and three
self-attention layers whose keys and values of one token take 128 bytes (block size 1)::

    cross-attention page   2 layers * 128 = 256 bytes
    self-attention page    3 layers * 128 = 384 bytes
    large page             lcm(256, 384)  = 768 bytes

    buffer    | large page 0      | large page 1      | large page 2      | large page 3      |
    owner     | null              | cross-attention   | self-attention    | free              |
    page ids  | 0                 | 3  .  4  .  5     | 4     .     5     |                   |

``page id = large page * pages per large page + place in it``, so that a group's pages are the
buffer cut evenly into pages of its size, and ``slot = page id * block_size + offset`` holds in
every group. Large page 0 is the null page of all groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm

from prefix_cache.specs.kv_cache_spec import HostOnlySpec, KVCacheSpec, MambaSpec

__all__ = ["KVCacheConfig", "KVCacheGroup", "group_layers", "pad_pages"]

# A large page is at most this many of the largest small page; beyond it pages are padded.
_MAX_LARGE_PAGE = 64


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers of one spec: they share one block table, and one small page holds all of them.

    Attributes:
        layer_names: in the order in which the layers lie inside a page.
        spec: what each of these layers keeps.
        padding_bytes: at the end of each page, unused; see :func:`pad_pages`.
    """

    layer_names: tuple[str, ...]
    spec: KVCacheSpec
    padding_bytes: int = 0

    @property
    def content_bytes(self) -> int:
        """Bytes of one small page that are used."""
        return len(self.layer_names) * self.spec.layer_page_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one small page: ``block_size`` tokens of all layers of the group."""
        return self.content_bytes + self.padding_bytes

    @property
    def on_device(self) -> bool:
        """Whether the group has pages in the buffer at all."""
        return not isinstance(self.spec, HostOnlySpec)


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The geometry of one engine's cache.

    Attributes:
        num_large_pages: of the buffer, the null page included; of one group they are its pages.
        groups: one entry per layer type; their index is the ``group_id`` everywhere.
        num_host_blocks: ids of a group without pages on the device, the null block included.

    Raises:
        ValueError: no pages beside the null page, no groups, or only host-only ones.
    """

    num_large_pages: int
    groups: tuple[KVCacheGroup, ...]
    num_host_blocks: int = 0

    def __post_init__(self) -> None:
        if self.num_large_pages < 2:
            raise ValueError(
                f"num_blocks must be at least 2 (block 0 is the null block), "
                f"got {self.num_large_pages}"
            )
        if not any(group.on_device for group in self.groups):
            raise ValueError("a KV cache needs at least one group of layers, got none")
        if self.num_host_blocks < 2 and not all(group.on_device for group in self.groups):
            raise ValueError(
                f"num_host_blocks must be at least 2 (block 0 is the null block), "
                f"got {self.num_host_blocks}"
            )

    @property
    def large_page_bytes(self) -> int:
        """Bytes of a large page."""
        return lcm(*(group.page_bytes for group in self.groups if group.on_device))

    def pages_per_large_page(self, group_id: int) -> int:
        """Pages of a group that a large page is cut into."""
        group = self.groups[group_id]
        return self.large_page_bytes // group.page_bytes if group.on_device else 1

    def num_blocks(self, group_id: int) -> int:
        """Block ids of a group, those of the null page included."""
        if not self.groups[group_id].on_device:
            return self.num_host_blocks
        return self.num_large_pages * self.pages_per_large_page(group_id)


def group_layers(layer_specs: Mapping[str, KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Group layers of equal spec, in order of first appearance, and pad odd pages.

    Args:
        layer_specs: layer name to what that layer keeps, in the order of the model's layers.
    """
    by_spec: dict[KVCacheSpec, list[str]] = {}
    for name, spec in layer_specs.items():
        by_spec.setdefault(spec, []).append(name)
    return pad_pages([KVCacheGroup(tuple(names), spec) for spec, names in by_spec.items()])


def pad_pages(groups: Sequence[KVCacheGroup]) -> tuple[KVCacheGroup, ...]:
    """Pad odd pages until the large page is at most 64 of the largest page.

    States of recurrent layers come last, because they may be padded to any size: an odd one is
    padded to suit the others. Among others, the larger page stays.
    """
    order = sorted(
        (index for index, group in enumerate(groups) if group.on_device),
        key=lambda i: (isinstance(groups[i].spec, MambaSpec), -groups[i].page_bytes),
    )
    padded = list(groups)
    large = largest = 1
    for index in order:
        padded[index] = _pad_to_suit(groups[index], large, largest)
        large = lcm(large, padded[index].page_bytes)
        largest = max(largest, padded[index].page_bytes)
    return tuple(padded)


def _pad_to_suit(group: KVCacheGroup, large: int, largest: int) -> KVCacheGroup:
    """The least padding with which a large page of the groups so far takes this one in."""
    unit = group.spec.page_unit_bytes
    size = group.page_bytes
    while lcm(large, size) > _MAX_LARGE_PAGE * max(largest, size):
        size += unit
    return replace(group, padding_bytes=size - group.content_bytes)
