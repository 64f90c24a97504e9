"""Specs of the state that a layer caches per token (or per sequence), one per layer type.

Also layer groups, and the page sizes that let all groups share one buffer.

Each group has its own page size. The buffer is divided into large pages whose size is the least
common multiple, so any group can use a whole large page. Two cross-attention and three
self-attention layers with 128 bytes of keys and values per token (block size 1)::

    cross-attention page   2 layers * 128 = 256 bytes
    self-attention page    3 layers * 128 = 384 bytes
    large page             lcm(256, 384)  = 768 bytes

    buffer    | large page 0      | large page 1      | large page 2      | large page 3      |
    owner     | null              | cross-attention   | self-attention    | free              |
    page ids  | 0                 | 3  .  4  .  5     | 4     .     5     |                   |

``page id = large page * pages per large page + index in it``, so a group's pages divide the buffer
evenly into pages of its size, and ``slot = page id * block_size + offset`` holds in every group.
Large page 0 is the null page of all groups.

Rows that towers compute from images and other media are stored in the same buffer, in a separate
group after the layer groups. A row need not fit a page: an item's rows are one byte string, split
into pages, so they do not increase the large page size::

    item of 5 rows    | row 0 | row 1 | row 2 | row 3 | row 4 |
    its pages         |   page 6    |   page 7    |  page 9 ..|
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod

import torch

# Alignment in bytes of each state in a page, because states of different dtypes share a page.
_STATE_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """State that every layer of a group caches; base class of one spec per layer type.

    Attributes:
        block_size: tokens per block (and per small page).
    """

    block_size: int

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")

    @property
    def layer_page_bytes(self) -> int:
        """Bytes per block and layer."""
        raise NotImplementedError(f"{type(self).__name__} states no page size")

    @property
    def page_unit_bytes(self) -> int:
        """Granularity of padding in bytes, which keeps views of a padded page integral."""
        raise NotImplementedError(f"{type(self).__name__} states no page size")


@dataclass(frozen=True, slots=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values per token; subclasses define which of them a layer can still need.

    Attributes:
        num_kv_heads: number of K and V heads after grouping (GQA).
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def page_unit_bytes(self) -> int:
        """Bytes of one chunk: a block's keys, or its values."""
        return self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def layer_page_bytes(self) -> int:
        """``2 (K, V) * block_size * num_kv_heads * head_dim * itemsize``."""
        return 2 * self.page_unit_bytes

    def num_needed(self, num_tokens: int, num_encoder_tokens: int) -> int:
        """Return how many tokens (encoder tokens in cross-attention) the last token attends to."""
        return num_tokens


@dataclass(frozen=True, slots=True)
class FullAttentionSpec(AttentionSpec):
    """Causal attention over the whole prefix; keys and values of all tokens are kept."""


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec(AttentionSpec):
    """Causal attention over the most recent tokens; blocks before the window are freed.

    Attributes:
        window: positions that a token attends to, itself included; at least one block.
    """

    window: int

    def __post_init__(self) -> None:
        KVCacheSpec.__post_init__(self)
        if self.window < self.block_size:
            raise ValueError(
                f"a sliding window of {self.window} tokens is smaller than a block of "
                f"{self.block_size}: set block_size to at most {self.window}"
            )

    def num_needed(self, num_tokens: int, num_encoder_tokens: int) -> int:
        """Return the window size, limited to the tokens that exist."""
        return min(num_tokens, self.window)


@dataclass(frozen=True, slots=True)
class CrossAttentionSpec(AttentionSpec):
    """Attention over an encoder's output: one table per request, filled once."""

    def num_needed(self, num_tokens: int, num_encoder_tokens: int) -> int:
        """Return the length of the encoder sequence."""
        return num_encoder_tokens


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a recurrent layer's state, for one sequence.

    Attributes:
        shape: shape without a batch dimension.
        dtype: element type, which may differ from the model's.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes, rounded up so that the next tensor is aligned."""
        nbytes = prod(self.shape) * self.dtype.itemsize
        return -(-nbytes // _STATE_ALIGNMENT) * _STATE_ALIGNMENT


@dataclass(frozen=True, slots=True)
class MambaSpec(KVCacheSpec):
    """State of a recurrent layer: a page holds the state after one token, for any block size."""

    states: tuple[StateTensor, ...]

    @property
    def page_unit_bytes(self) -> int:
        """The alignment: states are read through strided views, so any aligned page size works."""
        return _STATE_ALIGNMENT

    @property
    def layer_page_bytes(self) -> int:
        """Total size in bytes of all tensors of one state."""
        return sum(state.nbytes for state in self.states)


@dataclass(frozen=True, slots=True)
class HostOnlySpec(KVCacheSpec):
    """Block ids for every token without any layer state; outputs mirrored on the host use them.

    For models without a full-attention layer, whose own groups free early tokens.
    """

    @property
    def page_unit_bytes(self) -> int:
        """Placeholder granularity, since there are no pages on the device."""
        return 1

    @property
    def layer_page_bytes(self) -> int:
        """Zero, since nothing is stored on the device."""
        return 0


def spec_in_words(spec: KVCacheSpec) -> str:
    """Describe a spec in words, for example ``sliding window of 4096``.

    Raises:
        NotImplementedError: for a spec type without a description.
    """
    match spec:
        case SlidingWindowSpec():
            return f"sliding window of {spec.window}"
        case CrossAttentionSpec():
            return "cross-attention"
        case AttentionSpec():
            return "full attention"
        case MambaSpec():
            return "recurrent"
        case HostOnlySpec():
            return "on the host"
    raise NotImplementedError(f"no words for {type(spec).__name__}")


# Maximum ratio of the large page to the largest small page; pages are padded to stay within it.
_MAX_LARGE_PAGE = 64


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers of equal spec, which share one block table and are all stored in one small page.

    Attributes:
        layer_names: layers in the order in which they are stored in a page.
        spec: state that each of these layers caches.
        padding_bytes: unused bytes at the end of each page; see :func:`pad_pages`.
    """

    layer_names: tuple[str, ...]
    spec: KVCacheSpec
    padding_bytes: int = 0

    @property
    def content_bytes(self) -> int:
        """Used bytes of one small page."""
        return len(self.layer_names) * self.spec.layer_page_bytes

    @property
    def page_bytes(self) -> int:
        """Size of one small page: ``block_size`` tokens of all layers of the group."""
        return self.content_bytes + self.padding_bytes

    @property
    def on_device(self) -> bool:
        """True if the group has pages in the device buffer."""
        return not isinstance(self.spec, HostOnlySpec)


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """Geometry of one engine's cache.

    Attributes:
        num_large_pages: including the null page; with a single group, these are its pages.
        groups: one entry per layer type; the index is the ``group_id`` everywhere.
        num_host_blocks: block ids of a group without device pages, including the null block.
        item_page_bytes: size of a page of tower rows; 0 for a model without towers.
        max_item_pages: maximum number of held and cached item pages; None: limited by space only.

    Raises:
        ValueError: no pages except the null page, no groups on the device, or a large page that is
            not a multiple of ``item_page_bytes``.
    """

    num_large_pages: int
    groups: tuple[KVCacheGroup, ...]
    num_host_blocks: int = 0
    item_page_bytes: int = 0
    max_item_pages: int | None = None

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
        if self.item_page_bytes and self.large_page_bytes % self.item_page_bytes:
            raise ValueError(
                f"item_page_bytes must divide a large page of {self.large_page_bytes} bytes, "
                f"got {self.item_page_bytes}"
            )

    @property
    def item_group_id(self) -> int:
        """Group id of the tower rows, after those of the layer groups."""
        return len(self.groups)

    def with_item_pages(self, num_bytes: int, max_bytes: int | None = None) -> KVCacheConfig:
        """Return a copy with the smallest aligned item pages of at least ``num_bytes`` bytes.

        An item page is never larger than a large page.

        Args:
            max_bytes: limit on all item pages together, rounded up to whole pages; None: no limit.
        """
        whole, count = self.large_page_bytes, 1
        for each in range(2, whole // num_bytes + 1):
            if whole % (each * _STATE_ALIGNMENT) == 0:
                count = each
        size = whole // count
        max_pages = None if max_bytes is None else -(-max_bytes // size)
        return replace(self, item_page_bytes=size, max_item_pages=max_pages)

    def item_pages(self, num_bytes: int) -> int:
        """Return the number of pages for an item's rows of ``num_bytes`` bytes."""
        return -(-num_bytes // self.item_page_bytes) if num_bytes else 0

    @property
    def large_page_bytes(self) -> int:
        """Size of a large page in bytes."""
        return lcm(*(group.page_bytes for group in self.groups if group.on_device))

    def pages_per_large_page(self, group_id: int) -> int:
        """Return how many pages of a group one large page is divided into."""
        if group_id == self.item_group_id:
            return self.large_page_bytes // self.item_page_bytes
        group = self.groups[group_id]
        return self.large_page_bytes // group.page_bytes if group.on_device else 1

    def num_blocks(self, group_id: int) -> int:
        """Return the number of block ids of a group, including those of the null page."""
        if group_id < len(self.groups) and not self.groups[group_id].on_device:
            return self.num_host_blocks
        return self.num_large_pages * self.pages_per_large_page(group_id)


def group_layers(layer_specs: Mapping[str, KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Group layers of equal spec, given by name in model order, and pad page sizes."""
    by_spec: dict[KVCacheSpec, list[str]] = {}
    for name, spec in layer_specs.items():
        by_spec.setdefault(spec, []).append(name)
    return pad_pages([KVCacheGroup(tuple(names), spec) for spec, names in by_spec.items()])


def pad_pages(groups: Sequence[KVCacheGroup]) -> tuple[KVCacheGroup, ...]:
    """Pad pages until the large page is at most 64 times the largest page.

    Recurrent groups come last, because their states may be padded to any size and so can match the
    others. Among the others, smaller pages are padded to match larger ones.
    """
    order = sorted(
        (index for index, group in enumerate(groups) if group.on_device),
        key=lambda i: (isinstance(groups[i].spec, MambaSpec), -groups[i].page_bytes),
    )
    padded = list(groups)
    large = largest = 1
    for index in order:
        padded[index] = _pad_to_fit(groups[index], large, largest)
        large = lcm(large, padded[index].page_bytes)
        largest = max(largest, padded[index].page_bytes)
    return tuple(padded)


def _pad_to_fit(group: KVCacheGroup, large: int, largest: int) -> KVCacheGroup:
    """Add the minimum padding that keeps the combined large page within the limit."""
    unit = group.spec.page_unit_bytes
    size = group.page_bytes
    while lcm(large, size) > _MAX_LARGE_PAGE * max(largest, size):
        size += unit
    return replace(group, padding_bytes=size - group.content_bytes)
