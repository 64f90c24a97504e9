"""One buffer, many views: no row belongs to two layers, and one index serves all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from prefix_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    MambaSpec,
    PagedMemory,
    StateTensor,
)
from tests.support.tiny_kv_cache import mixed_config

NUM_BLOCKS, BLOCK_SIZE, NUM_LAYERS, KV_HEADS, HEAD_DIM = 5, 4, 3, 2, 6


def new_memory() -> PagedMemory:
    spec = FullAttentionSpec(BLOCK_SIZE, KV_HEADS, HEAD_DIM, torch.float32)
    group = KVCacheGroup(tuple(f"layer.{index}" for index in range(NUM_LAYERS)), spec)
    return PagedMemory(KVCacheConfig(NUM_BLOCKS, (group,)))


def test_sizes_and_zeros():
    memory = new_memory()
    row_bytes = KV_HEADS * HEAD_DIM * 4
    assert memory.nbytes == NUM_BLOCKS * NUM_LAYERS * 2 * BLOCK_SIZE * row_bytes
    assert memory.buffer.numel() == memory.nbytes and not memory.buffer.any()


def test_every_token_of_every_layer_has_its_own_row_for_key_and_value():
    memory = new_memory()
    slots = torch.arange(NUM_BLOCKS * BLOCK_SIZE)
    rows = memory.row_mapping(0, slots)
    number = 1.0
    expected = {}
    for index in range(NUM_LAYERS):
        layer = memory.layer(0, index)
        for name, view in (("keys", layer.keys), ("values", layer.values)):
            content = torch.arange(len(slots), dtype=torch.float32) + number
            view.index_copy_(0, rows, content[:, None, None].expand(-1, KV_HEADS, HEAD_DIM))
            expected[index, name] = content
            number += len(slots)
    for (index, name), content in expected.items():
        view = getattr(memory.layer(0, index), name)
        assert torch.equal(view[rows][:, 0, 0], content)
    # All of the buffer is in use: nothing is lost between pages.
    assert (memory.buffer.view(torch.float32) != 0).all()


def test_clearing_a_page_clears_its_rows_in_every_layer_and_no_others():
    memory = new_memory()
    memory.buffer.fill_(1)
    memory.clear_page(0, 2)
    slots = torch.arange(NUM_BLOCKS * BLOCK_SIZE)
    rows = memory.row_mapping(0, slots)
    cleared = slots // BLOCK_SIZE == 2
    for index in range(NUM_LAYERS):
        layer = memory.layer(0, index)
        for view in (layer.keys, layer.values):
            assert torch.equal((view[rows] == 0).all(dim=(1, 2)), cleared)
            assert torch.equal((view[rows] == 0).any(dim=(1, 2)), cleared)


def byte_range(memory: PagedMemory, view: torch.Tensor) -> set[int]:
    """Bytes of the buffer that a view reads, found by writing through it."""
    memory.buffer.zero_()
    *outer, inner = view.shape
    ones = torch.ones(*outer, inner * view.itemsize, dtype=torch.uint8)
    view.copy_(ones.view(view.dtype))
    return set(memory.buffer.nonzero().flatten().tolist())


def pages_of(memory: PagedMemory, group_id: int) -> list[set[int]]:
    """Per page of a group, the bytes that any of its layers' views reach there."""
    group = memory.config.groups[group_id]
    pages = []
    for page in range(memory.config.num_blocks(group_id)):
        reached: set[int] = set()
        for index in range(len(group.layer_names)):
            if isinstance(group.spec, MambaSpec):
                for state in memory.state(group_id, index):
                    reached |= byte_range(memory, state[page])
            else:
                layer = memory.layer(group_id, index)
                first = page * layer.chunks_per_page + 2 * index
                reached |= byte_range(memory, layer.chunks[first : first + 2])
        pages.append(reached)
    return pages


def test_pages_of_different_sizes_overlap_only_inside_of_one_large_page():
    config = mixed_config({"full": 2, "sliding": 3, "mamba": 4}, 3, 4)
    memory = PagedMemory(config)
    assert config.large_page_bytes == 12 * 32
    for group_id in range(3):
        ratio = config.pages_per_large_page(group_id)
        seen: set[int] = set()
        for page, reached in enumerate(pages_of(memory, group_id)):
            large = {byte // config.large_page_bytes for byte in reached}
            assert large == {page // ratio}, "a page lies in its own large page"
            assert not reached & seen, "pages of a group never overlap"
            seen |= reached
        assert len(seen) == memory.nbytes, "and fill the buffer"


def padded_config() -> KVCacheConfig:
    """Odd states beside attention; and attention pages that are padded, by hand."""
    states = (StateTensor((3, 5), torch.bfloat16), StateTensor((7,), torch.float32))
    attention = FullAttentionSpec(BLOCK_SIZE, KV_HEADS, HEAD_DIM, torch.float32)
    page = 2 * attention.layer_page_bytes
    odd = KVCacheGroup(("m.0", "m.1", "m.2"), MambaSpec(BLOCK_SIZE, states))
    return KVCacheConfig(
        3,
        (
            KVCacheGroup(("a.0", "a.1"), attention, padding_bytes=page),
            replace(odd, padding_bytes=page // 2 - odd.content_bytes),
        ),
    )


def test_rows_of_padded_pages_follow_the_formula():
    memory = PagedMemory(padded_config())
    layer = memory.layer(0, 1)
    assert layer.chunks_per_page == 8, "four are used"
    slots = torch.arange(memory.config.num_blocks(0) * BLOCK_SIZE)
    rows = memory.row_mapping(0, slots)
    assert torch.equal(rows, slots // BLOCK_SIZE * 8 * BLOCK_SIZE + slots % BLOCK_SIZE)
    layer.keys[rows] = torch.randn(len(slots), KV_HEADS, HEAD_DIM)
    for page in range(memory.config.num_blocks(0)):
        of_page = rows[page * BLOCK_SIZE : (page + 1) * BLOCK_SIZE]
        assert torch.equal(layer.chunks[page * 8 + 2], layer.keys[of_page])
    reached = set().union(*pages_of(memory, 0))
    assert len(reached) == memory.nbytes // 2, "the padding is nobody's"


def test_states_come_back_as_written_whatever_their_types():
    memory = PagedMemory(padded_config())
    num_pages = memory.config.num_blocks(1)
    written = []
    for index in range(3):
        conv, ssm = memory.state(1, index)
        assert (conv.shape, conv.dtype) == ((num_pages, 3, 5), torch.bfloat16)
        assert (ssm.shape, ssm.dtype) == ((num_pages, 7), torch.float32)
        written.append((torch.randn(num_pages, 3, 5).bfloat16(), torch.randn(num_pages, 7)))
        conv.copy_(written[-1][0])
        ssm.copy_(written[-1][1])
    for index, (conv, ssm) in enumerate(written):
        read = memory.state(1, index)
        assert torch.equal(read[0], conv) and torch.equal(read[1], ssm)


def test_clearing_a_page_clears_all_groups_pages_that_lie_there():
    memory = PagedMemory(mixed_config({"full": 2, "mamba": 3}, 3, 4))
    memory.buffer.fill_(1)
    memory.clear_null_page()
    for group_id, ratio in ((0, 3), (1, 2)):
        assert memory.config.pages_per_large_page(group_id) == ratio
    (states,) = memory.state(1, 0)
    assert not states[:2].any() and states[2:].all()
    memory.clear_page(1, 3)
    assert not states[3].any() and states[2].all() and states[4:].all()


def test_groups_are_not_taken_for_what_they_are_not():
    memory = PagedMemory(mixed_config({"full": 1, "mamba": 1, "host": 1}, 3, 4))
    with pytest.raises(ValueError, match=r"group 0 \(FullAttentionSpec\) keeps no states"):
        memory.state(0, 0)
    with pytest.raises(ValueError, match=r"group 1 \(MambaSpec\) keeps no keys and values"):
        memory.layer(1, 0)
    with pytest.raises(ValueError, match=r"group 2 \(HostOnlySpec\) keeps no keys and values"):
        memory.row_mapping(2, torch.tensor([0]))
