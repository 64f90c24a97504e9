"""One buffer, many views: no row belongs to two layers, and one index serves all of them."""

from __future__ import annotations

import pytest
import torch

from prefix_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroup, PagedMemory
from tests.support.tiny_kv_cache import tiny_config

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


def test_the_row_formula_of_the_layout():
    memory = new_memory()
    for page, offset in ((0, 0), (1, 0), (3, 2)):
        slot = torch.tensor([page * BLOCK_SIZE + offset])
        assert memory.row_mapping(0, slot).item() == page * 2 * NUM_LAYERS * BLOCK_SIZE + offset


def test_chunks_are_the_same_rows_by_page_layer_and_kind():
    memory = new_memory()
    slots = torch.arange(NUM_BLOCKS * BLOCK_SIZE)
    rows = memory.row_mapping(0, slots)
    for index in range(NUM_LAYERS):
        layer = memory.layer(0, index)
        layer.keys[rows] = torch.randn(len(slots), KV_HEADS, HEAD_DIM)
        layer.values[rows] = torch.randn(len(slots), KV_HEADS, HEAD_DIM)
        for page in range(NUM_BLOCKS):
            first = page * layer.chunks_per_page + 2 * layer.layer_index
            of_page = rows[page * BLOCK_SIZE : (page + 1) * BLOCK_SIZE]
            assert torch.equal(layer.chunks[first], layer.keys[of_page])
            assert torch.equal(layer.chunks[first + 1], layer.values[of_page])


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


def test_more_than_one_group_is_refused():
    with pytest.raises(NotImplementedError, match=r"one KV-cache group .* the model has 2"):
        PagedMemory(tiny_config(4, BLOCK_SIZE, num_groups=2))
