"""What one layer keeps per token (or per sequence), one spec per layer type.

Groups of layers, and the page sizes that let all groups share one buffer.

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

Rows that towers make of images and the like lie in the same buffer, in a group of their own behind
those of the layers. A row need not fit a page: an item's rows are one string of bytes, cut into
pages, so that a large page is no larger for them::

    item of 5 rows    | row 0 | row 1 | row 2 | row 3 | row 4 |
    its pages         |   page 6    |   page 7    |  page 9 ..|
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod

import torch

# States of different types lie side by side in a page; each begins at a multiple of this.
_STATE_ALIGNMENT = 16


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

    @property
    def page_unit_bytes(self) -> int:
        """A padded page is a multiple of this, so that views of it stay whole."""
        raise NotImplementedError(f"{type(self).__name__} states no page size")


@dataclass(frozen=True, slots=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values per token; which of them a layer can still need is the subclass's matter.

    Attributes:
        num_kv_heads: heads of K and V after grouping (GQA).
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def page_unit_bytes(self) -> int:
        """One chunk: keys, or values, of a block: ``block_size * num_kv_heads * head_dim``."""
        return self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def layer_page_bytes(self) -> int:
        """``2 (K, V) * block_size * num_kv_heads * head_dim * itemsize``."""
        return 2 * self.page_unit_bytes

    def num_needed(self, num_tokens: int, num_encoder_tokens: int) -> int:
        """Tokens, of the encoder in cross-attention, that a request's last one works with."""
        return num_tokens


@dataclass(frozen=True, slots=True)
class FullAttentionSpec(AttentionSpec):
    """Causal attention over everything before: keys and values of all tokens are kept."""


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec(AttentionSpec):
    """Causal attention over the last tokens: what lies before the window is given back.

    Attributes:
        window: positions that a token sees, itself included; at least one block.
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
        """The window, or what there is of it."""
        return min(num_tokens, self.window)


@dataclass(frozen=True, slots=True)
class CrossAttentionSpec(AttentionSpec):
    """Attention over an encoder's output: one table per request, filled once."""

    def num_needed(self, num_tokens: int, num_encoder_tokens: int) -> int:
        """The whole encoder sequence."""
        return num_encoder_tokens


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a recurrent layer's state, for one sequence.

    Attributes:
        shape: without a batch dimension.
        dtype: its element type, which need not be the model's.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes it takes, rounded up so that whatever follows is aligned."""
        nbytes = prod(self.shape) * self.dtype.itemsize
        return -(-nbytes // _STATE_ALIGNMENT) * _STATE_ALIGNMENT


@dataclass(frozen=True, slots=True)
class MambaSpec(KVCacheSpec):
    """A recurrent layer: a page is the state after some token, whatever the block size."""

    states: tuple[StateTensor, ...]

    @property
    def page_unit_bytes(self) -> int:
        """States are read through strided views, so any aligned page size will do."""
        return _STATE_ALIGNMENT

    @property
    def layer_page_bytes(self) -> int:
        """All tensors of one state."""
        return sum(state.nbytes for state in self.states)


@dataclass(frozen=True, slots=True)
class HostOnlySpec(KVCacheSpec):
    """No layer's state: block ids for every token, which outputs on the host are mirrored by.

    For models without a full-attention layer, whose own groups let go of early tokens.
    """

    @property
    def page_unit_bytes(self) -> int:
        """Nothing on the device."""
        return 1

    @property
    def layer_page_bytes(self) -> int:
        """Nothing on the device."""
        return 0


def spec_in_words(spec: KVCacheSpec) -> str:
    """What layers of a spec keep, such as ``sliding window of 4096``.

    Raises:
        NotImplementedError: there are no words for such a spec here yet.
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
        item_page_bytes: of a page of towers' rows; 0 for a model without towers.
        max_item_pages: most of these, held and cached; None: as many as there is room for.

    Raises:
        ValueError: no pages beside the null page, no groups, or only host-only ones; or pages of
            towers' rows do not fill a large page.
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
        """The group of towers' rows, behind those of layers."""
        return len(self.groups)

    def with_item_pages(self, num_bytes: int, most_bytes: int | None = None) -> KVCacheConfig:
        """The same with pages for towers' rows: the smallest that hold so many bytes.

        No larger than a large page, and not so small that rows would not be aligned.

        Args:
            most_bytes: of all such pages together, in whole pages; None: no limit.
        """
        whole, count = self.large_page_bytes, 1
        for each in range(2, whole // num_bytes + 1):
            if whole % (each * _STATE_ALIGNMENT) == 0:
                count = each
        size = whole // count
        most = None if most_bytes is None else -(-most_bytes // size)
        return replace(self, item_page_bytes=size, max_item_pages=most)

    def item_pages(self, num_bytes: int) -> int:
        """Pages that an item's rows take."""
        return -(-num_bytes // self.item_page_bytes) if num_bytes else 0

    @property
    def large_page_bytes(self) -> int:
        """Bytes of a large page."""
        return lcm(*(group.page_bytes for group in self.groups if group.on_device))

    def pages_per_large_page(self, group_id: int) -> int:
        """Pages of a group that a large page is cut into."""
        if group_id == self.item_group_id:
            return self.large_page_bytes // self.item_page_bytes
        group = self.groups[group_id]
        return self.large_page_bytes // group.page_bytes if group.on_device else 1

    def num_blocks(self, group_id: int) -> int:
        """Block ids of a group, those of the null page included."""
        if group_id < len(self.groups) and not self.groups[group_id].on_device:
            return self.num_host_blocks
        return self.num_large_pages * self.pages_per_large_page(group_id)


def group_layers(layer_specs: Mapping[str, KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Group layers of equal spec, given by name in the model's order, and pad odd pages."""
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
