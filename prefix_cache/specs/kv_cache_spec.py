"""What one layer keeps per token (or per sequence), one spec per layer type."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

__all__ = [
    "AttentionSpec",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "FullAttentionSpec",
    "HostOnlySpec",
    "KVCacheSpec",
    "MambaSpec",
    "SlidingWindowSpec",
    "StateTensor",
    "spec_in_words",
]

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
        head_dim: elements per head.
        dtype: element type of the stored keys and values.
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

    def _check_reach(self, name: str, num_tokens: int) -> None:
        KVCacheSpec.__post_init__(self)
        if num_tokens < self.block_size:
            raise ValueError(
                f"{name} of {num_tokens} tokens is smaller than a block of "
                f"{self.block_size}: set block_size to at most {num_tokens}"
            )


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
        self._check_reach("a sliding window", self.window)

    def num_needed(self, num_tokens: int, num_encoder_tokens: int) -> int:
        """The window, or what there is of it."""
        return min(num_tokens, self.window)


@dataclass(frozen=True, slots=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Causal attention inside chunks: a token sees its chunk's tokens up to itself.

    Attributes:
        chunk_size: tokens per chunk; at least one block.
    """

    chunk_size: int

    def __post_init__(self) -> None:
        self._check_reach("an attention chunk", self.chunk_size)

    def num_needed(self, num_tokens: int, num_encoder_tokens: int) -> int:
        """The last token's chunk, up to itself."""
        return (num_tokens - 1) % self.chunk_size + 1


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
    """A recurrent layer: a page is the state after some token, whatever the block size.

    Attributes:
        states: the tensors that make up one sequence's state.
    """

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
        case ChunkedLocalAttentionSpec():
            return f"attention in chunks of {spec.chunk_size}"
        case CrossAttentionSpec():
            return "cross-attention"
        case AttentionSpec():
            return "full attention"
        case MambaSpec():
            return "recurrent"
        case HostOnlySpec():
            return "on the host"
    raise NotImplementedError(f"no words for {type(spec).__name__}")
