"""Blocks (small pages), the large pages that contain them, and block hashes.

A block's hash covers everything that determines its content, chained from the first token.

::

    root ──► block 0 ──► block 1 ──► ...      block = SHA-256(parent, token ids, spans that overlap)
     │                                        root  = SHA-256(cache salt, LoRA name)
     └ differs per salt, so all blocks after it do
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NewType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BlockHash = NewType("BlockHash", bytes)
"""A SHA-256 digest, 32 bytes."""


@dataclass(frozen=True, slots=True)
class ContentSpan:
    """Positions of a sequence whose content is not determined by their token ids.

    Attributes:
        kind: kind of content ("image", "audio", "prompt_embeds", ...).
        offset: first position of the span in the sequence, in tokens.
        content_hash: digest of the whole content; see :func:`content_hash`.
    """

    kind: str
    offset: int
    length: int
    content_hash: bytes

    def __post_init__(self) -> None:
        if self.offset < 0:
            raise ValueError(f"a content span cannot start before position 0, got {self.offset}")
        if self.length < 1:
            raise ValueError(f"a content span covers at least one token, got {self.length}")

    @property
    def end(self) -> int:
        """First position after the span."""
        return self.offset + self.length


def content_hash(data: Tensor) -> bytes:
    """Return the SHA-256 of a dense tensor's dtype, shape and bytes (any dtype, any device)."""
    flat = data.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.sha256()
    digest.update(_length_prefixed(str(data.dtype).encode()))
    digest.update(struct.pack(f"<Q{data.dim()}q", data.dim(), *data.shape))
    # Viewed as bytes because numpy has no bfloat16.
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.digest()


def extend_block_hashes(
    hashes: list[BlockHash],
    token_ids: Sequence[int] | NDArray[np.integer],
    block_size: int,
    *,
    spans: Sequence[ContentSpan] = (),
    salt: str | None = None,
    lora_name: str | None = None,
) -> None:
    """Append the hashes of blocks that became full; the cost depends on the new blocks only.

    Args:
        hashes: hashes of the leading blocks of the same sequence; extended in place.
        token_ids: the whole sequence so far, ``(num_tokens,)``. Token ids are hashed everywhere,
            including under a span, so placeholders need a fixed id.
        spans: all non-token content of the sequence, in any order. A block's hash includes each
            overlapping span with its offset relative to the block, so the second half of an
            image differs from its first half, and from the same image one token later.
        salt: requests share blocks only under the same salt; ``None`` and ``""`` differ.
        lora_name: adapter that computed the blocks, if any.

    Raises:
        ValueError: if ``block_size`` is below 1, or ``hashes`` covers more than ``token_ids``.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    num_full_blocks = len(token_ids) // block_size
    if len(hashes) > num_full_blocks:
        raise ValueError(
            f"got {len(hashes)} block hashes for {len(token_ids)} tokens, "
            f"which fill only {num_full_blocks} blocks of {block_size}"
        )
    if len(hashes) == num_full_blocks:
        return
    parent = hashes[-1] if hashes else _root_hash(salt, lora_name)
    upcoming = deque(sorted(spans, key=_span_order))
    overlapping: list[ContentSpan] = []
    first, end_of_all = len(hashes) * block_size, num_full_blocks * block_size
    ids = struct.pack(f"<{end_of_all - first}q", *token_ids[first:end_of_all])
    for start in range(first, end_of_all, block_size):
        end = start + block_size
        if spans:
            while upcoming and upcoming[0].offset < end:
                overlapping.append(upcoming.popleft())
            overlapping = [span for span in overlapping if span.end > start]
        own_ids = ids[(start - first) * 8 : (end - first) * 8]
        parent = _hash_of(b"block", parent, own_ids, overlapping, start, block_size)
        hashes.append(parent)


def partial_block_hash(
    hashes: Sequence[BlockHash],
    token_ids: Sequence[int] | NDArray[np.integer],
    block_size: int,
    *,
    spans: Sequence[ContentSpan] = (),
    salt: str | None = None,
    lora_name: str | None = None,
) -> BlockHash:
    """Return the hash of a sequence's partial last block; never equal to that of a full block.

    Args:
        hashes: hashes of the sequence's full blocks; additional ones are ignored.
        token_ids: the whole sequence.

    The others are as for :func:`extend_block_hashes`.

    Raises:
        ValueError: if the last block is full, or the hash of an earlier block is missing.
    """
    num_full, num_rest = divmod(len(token_ids), block_size)
    if not num_rest or len(hashes) < num_full:
        raise ValueError(
            f"got {len(hashes)} block hashes for {len(token_ids)} tokens, which are {num_full} "
            f"blocks of {block_size} and {num_rest} tokens; expected hashes of all full blocks, "
            "and a rest"
        )
    start = num_full * block_size
    own = sorted(
        (span for span in spans if span.offset < len(token_ids) and span.end > start),
        key=_span_order,
    )
    parent = hashes[num_full - 1] if num_full else _root_hash(salt, lora_name)
    own_ids = struct.pack(f"<{num_rest}q", *token_ids[start:])
    return _hash_of(b"partial", parent, own_ids, own, start, num_rest)


def _span_order(span: ContentSpan) -> tuple[int, int, str, bytes]:
    """Sort key that makes hashes independent of the order in which spans are listed."""
    return span.offset, span.length, span.kind, span.content_hash


def _hash_of(
    kind: bytes,
    parent: BlockHash,
    own_ids: bytes,
    spans: Sequence[ContentSpan],
    start: int,
    num_tokens: int,
) -> BlockHash:
    """Hash one block; fields have fixed size or a length prefix, so the encoding is unambiguous."""
    fields = [kind, parent, struct.pack("<QQ", num_tokens, len(spans)), own_ids]
    for span in spans:
        fields += _length_prefixed(span.kind.encode()), _length_prefixed(span.content_hash)
        fields.append(struct.pack("<qq", span.offset - start, span.length))
    return BlockHash(hashlib.sha256(b"".join(fields)).digest())


def whole_input_hash(
    token_ids: Sequence[int] | NDArray[np.integer],
    *,
    spans: Sequence[ContentSpan] = (),
    salt: str | None = None,
) -> BlockHash:
    """Return the hash of a whole input as a single block: the key for bidirectional encoders.

    Raises:
        ValueError: for an empty input.
    """
    if len(token_ids) == 0:
        raise ValueError("an empty input has no hash")
    hashes: list[BlockHash] = []
    extend_block_hashes(hashes, token_ids, len(token_ids), spans=spans, salt=salt)
    return hashes[0]


def whole_input_block_hashes(
    input_hash: BlockHash, num_tokens: int, block_size: int
) -> Iterator[BlockHash]:
    """Yield one key per block of a whole input, including its partial last block.

    Keys are computed lazily, because a miss is detected at the first one.

    Args:
        input_hash: see :func:`whole_input_hash`.
    """
    for index in range(-(-num_tokens // block_size)):
        place = struct.pack("<QQ", index, num_tokens)
        yield BlockHash(hashlib.sha256(b"whole" + input_hash + place).digest())


def _root_hash(salt: str | None, lora_name: str | None) -> BlockHash:
    digest = hashlib.sha256(b"root")
    for given in (salt, lora_name):
        # Any str is a valid salt, even a lone surrogate.
        name = None if given is None else given.encode("utf-8", "surrogatepass")
        digest.update(b"\0" if name is None else b"\1" + _length_prefixed(name))
    return BlockHash(digest.digest())


def _length_prefixed(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


class IntegrityError(RuntimeError):
    """Two records of the same fact disagree; the message contains both values."""


EvictionKey = tuple[int, int]
"""Priority and time of last use; within a priority, the smaller key is evicted first."""


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """Bookkeeping of one block. Compared by identity; modified by the :class:`BlockPool` only.

    Attributes:
        block_id: index of the block in its group; ``slot = block_id * block_size + offset``.
        group_id: KV-cache group of the block, which is the group of its large page.
        large_page: page that contains the block; None for the null block.
        ref_cnt: number of block tables that hold the block. At 0 it is in a queue of the pool.
        block_hash: set while the block can be found by its content.
        generation: how often the block id was allocated; 0 means never. Data written for an
            earlier generation is not this block's content.
        key: priority and time of the last release; meaningful while no table holds the block.
        is_reused: true if its content had a prefix hit since, or was computed a second time.
    """

    block_id: int
    group_id: int
    large_page: LargePage | None
    ref_cnt: int = 0
    block_hash: BlockHash | None = None
    generation: int = 0
    key: EvictionKey = (0, 0)
    is_reused: bool = False


@dataclass(slots=True, eq=False)
class LargePage:
    """Large page, either free or divided into the blocks of one group.

    Attributes:
        group_id: group that uses it; None while it is free.
        blocks: all its blocks, in order; empty while it is free.
        free: its blocks that are not held and have no content; allocated from the end.
        num_held: number of its blocks that tables hold.
        key: highest priority of its content, and the time at which it became unheld.
    """

    page_id: int
    group_id: int | None = None
    blocks: list[KVCacheBlock] = field(default_factory=list)
    free: list[KVCacheBlock] = field(default_factory=list)
    num_held: int = 0
    key: EvictionKey = (0, 0)

    @property
    def cached(self) -> Iterator[KVCacheBlock]:
        """Blocks that no table holds and that can be found by their content."""
        return (b for b in self.blocks if b.ref_cnt == 0 and b.block_hash is not None)
