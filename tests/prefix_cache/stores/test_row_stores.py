"""Stores of rows and pages: promise 3, whole inputs, views of one buffer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from prefix_cache import (
    BlockPool,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    MambaSpec,
    PagedMemory,
    StageOutputCache,
    StateTensor,
    WholeInputCache,
    check_pool_integrity,
    whole_input_hash,
)
from tests.support.tiny_kv_cache import mixed_config

BLOCK_SIZE = 4


def new_cache(num_held: int = 1, names=None) -> tuple[StageOutputCache, list[int]]:
    """Return a cache of a pool of six blocks and the ids of ``num_held`` allocated blocks."""
    pool = BlockPool.uniform(6)
    ids = [block.block_id for block in pool.allocate({0: num_held})[0]]
    return StageOutputCache(6, BLOCK_SIZE, pool.generations(0), names), ids


def slots_of(block_ids: list[int], start: int, end: int) -> Tensor:
    """Slots of positions [start, end), computed one by one."""
    return torch.tensor(
        [block_ids[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, end)],
        dtype=torch.int64,
    )


def numbered(num_rows: int, width: int = 3, first: float = 1.0) -> Tensor:
    return torch.arange(num_rows * width, dtype=torch.float32).view(num_rows, width) + first


def test_rows_are_gathered_by_block_table_in_any_order_of_blocks():
    cache, ids = new_cache(3)
    ids.reverse()
    rows = numbered(10)
    cache.write(slots_of(ids, 0, 10), {"h": rows})
    assert torch.equal(cache.gather(ids, 10)["h"], rows)
    assert torch.equal(cache.gather(ids, 9, start=3)["h"], rows[3:9])
    assert torch.equal(cache.gather(ids, 8, start=4)["h"], rows[4:8])
    assert cache.gather(ids, 5, start=5)["h"].shape == (0, 3)
    assert cache.num_valid_rows(ids) == 10 and cache.num_valid_blocks(ids) == 2


def test_stores_have_the_stated_shape_and_each_name_its_own_type():
    cache, ids = new_cache()
    codes = torch.tensor([[[1, 2], [3, 4]]] * 4, dtype=torch.int32)
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16)
    cache.write(slots_of(ids, 0, 4), {"codes": codes, "scores": scores})
    assert cache.shapes == {"codes": (6, 4, 2, 2), "scores": (6, 4)}
    gathered = cache.gather(ids, 4)
    assert torch.equal(gathered["codes"], codes) and gathered["codes"].dtype == torch.int32
    assert torch.equal(gathered["scores"], scores) and gathered["scores"].dtype == torch.bfloat16
    tags = 6 * 4 * 8
    assert cache.nbytes_by_name == {"codes": 6 * 4 * 4 * 4 + tags, "scores": 6 * 4 * 2 + tags}
    assert cache.nbytes == sum(cache.nbytes_by_name.values())


def test_rows_may_be_empty():
    cache, ids = new_cache()
    assert cache.gather([], 0) == {}
    cache.write(slots_of(ids, 0, 4), {"h": numbered(4), "nothing": torch.empty(4, 0)})
    gathered = cache.gather(ids, 3)
    assert (gathered["h"].shape, gathered["nothing"].shape) == ((3, 3), (3, 0))
    assert {name: rows.shape[0] for name, rows in cache.gather([], 0).items()} == {
        "h": 0,
        "nothing": 0,
    }


def test_gathered_rows_share_no_memory_with_the_store():
    cache, ids = new_cache()
    source = numbered(4)
    cache.write(slots_of(ids, 0, 4), {"h": source})
    source.zero_()
    first = cache.gather(ids, 4)["h"]
    first.zero_()
    assert torch.equal(cache.gather(ids, 4)["h"], numbered(4))


def test_blocks_that_were_never_allocated_hold_no_rows():
    cache, _ = new_cache(0)
    cache.write(torch.arange(4), {"h": numbered(4)})
    # Slots 0 to 3 are the null block: padding may be written there and is never returned.
    assert cache.gather([0], 1) == {} and cache.num_valid_rows([0]) == 0
    # Block 3 was neither allocated nor written: both generations are 0, which is no match.
    assert cache.gather([3], 1) == {}


def test_a_tensor_of_another_length_is_dropped_permanently():
    cache, ids = new_cache(2)
    # Two requests decode one token each: the pooled rows, one per request, look like tokens.
    decode = slots_of(ids, 0, 1), slots_of(ids, 4, 5)
    cache.write(torch.cat(decode), {"h": numbered(2), "pooled": numbered(2)})
    assert cache.gather(ids, 1).keys() == {"h", "pooled"}
    # A prefill step distinguishes them.
    cache.write(slots_of(ids, 1, 4), {"h": numbered(3), "pooled": numbered(2)})
    assert cache.shapes.keys() == cache.wanted == {"h"}
    assert cache.mirrors("h") and cache.mirrors("new") and not cache.mirrors("pooled")
    cache.write(torch.cat(decode), {"h": numbered(2), "pooled": numbered(2)})
    assert cache.shapes.keys() == {"h"}
    assert cache.num_valid_blocks(ids[:1]) == 1, "a dropped name is not required"


def test_scalars_are_dropped_and_a_step_without_tokens_drops_nothing():
    cache, _ = new_cache()
    cache.write(torch.empty(0, dtype=torch.int64), {"h": numbered(3)})
    cache.write(torch.tensor([4]), {"loss": torch.tensor(1.0), "h": numbered(1)})
    assert cache.shapes.keys() == {"h"}


def test_only_named_tensors_are_mirrored_and_all_of_them_are_wanted():
    cache, ids = new_cache(names=["h", "codes"])
    cache.write(slots_of(ids, 0, 4), {"h": numbered(4), "other": numbered(4)})
    assert cache.shapes.keys() == {"h"} and cache.wanted == {"h", "codes"}
    assert cache.mirrors("codes") and not cache.mirrors("other")
    assert cache.num_valid_blocks(ids) == 0, "codes were never written"
    cache.write(slots_of(ids, 0, 4), {"codes": numbered(4)})
    assert cache.num_valid_blocks(ids) == 1
    assert cache.gather(ids, 4, names=["codes"]).keys() == {"codes"}


def test_a_wanted_tensor_that_is_not_per_token_is_dropped():
    cache, ids = new_cache(names=["h", "pooled"])
    cache.write(slots_of(ids, 0, 4), {"h": numbered(4), "pooled": numbered(1)})
    assert cache.wanted == {"h"} and cache.num_valid_blocks(ids) == 1


def test_a_cache_without_tensors_shortens_no_hit():
    cache, ids = new_cache(2)
    assert cache.num_valid_blocks(ids) == 2 and cache.gather(ids, 8) == {}
    none_mirrored, ids = new_cache(2, names=[])
    none_mirrored.write(slots_of(ids, 0, 8), {"h": numbered(8)})
    assert none_mirrored.shapes == {} and none_mirrored.num_valid_blocks(ids) == 2


@pytest.mark.parametrize("changed", [numbered(4, width=5), numbered(4).double()])
def test_a_changed_width_or_type_is_an_error_and_writes_nothing(changed):
    cache, ids = new_cache()
    tensors = {"a": numbered(4), "h": numbered(4)}
    cache.write(slots_of(ids, 0, 4), tensors)
    with pytest.raises(
        ValueError, match=r"'h' has rows of shape \(\d,\).*had shape \(3,\)"
    ) as error:
        cache.write(slots_of(ids, 0, 4), {"a": numbered(4, first=9.0), "h": changed})
    assert str(changed.dtype) in str(error.value)
    assert torch.equal(cache.gather(ids, 4)["a"], tensors["a"])
    # Later writes succeed.
    cache.write(slots_of(ids, 0, 4), {"h": numbered(4, first=7.0)})
    assert torch.equal(cache.gather(ids, 4)["h"], numbered(4, first=7.0))


def test_grad_and_inference_modes_of_the_model_do_not_matter():
    cache, ids = new_cache()
    with torch.inference_mode():
        cache.write(slots_of(ids, 0, 2), {"h": numbered(2)})
    cache.write(slots_of(ids, 2, 4), {"h": numbered(2).requires_grad_()})
    gathered = cache.gather(ids, 4)["h"]
    assert not gathered.requires_grad and not gathered.is_inference()
    assert torch.equal(gathered, torch.cat([numbered(2), numbered(2)]))


def test_mistakes_are_named():
    pool, (cache, _) = BlockPool.uniform(6), new_cache()
    with pytest.raises(ValueError, match=r"rows \[0, 9\) are not within 2 blocks of 4"):
        cache.gather([1, 2], 9)
    with pytest.raises(ValueError, match=r"rows \[3, 2\)"):
        cache.gather([1, 2], 2, start=3)
    with pytest.raises(ValueError, match=r"int64 of shape \(7,\), got torch.int64 of shape \(6,\)"):
        StageOutputCache(7, BLOCK_SIZE, pool.generations(0))
    with pytest.raises(ValueError, match=r"got torch.int32"):
        StageOutputCache(6, BLOCK_SIZE, pool.generations(0).int())


INPUT = [5, 6, 7, 8, 9, 10]


def new_input_cache(num_blocks: int = 6) -> WholeInputCache:
    pool = BlockPool.uniform(num_blocks)
    outputs = StageOutputCache(num_blocks, BLOCK_SIZE, pool.generations(0))
    return WholeInputCache(pool, outputs, BLOCK_SIZE)


def write(cache: WholeInputCache, blocks, num_tokens: int, value: float, name: str = "h") -> None:
    slots = [
        blocks[p // BLOCK_SIZE].block_id * BLOCK_SIZE + p % BLOCK_SIZE for p in range(num_tokens)
    ]
    cache.stage_outputs.write(torch.tensor(slots), {name: torch.full((num_tokens, 2), value)})


def encode(cache: WholeInputCache, token_ids, value: float) -> None:
    blocks = cache.allocate(len(token_ids))
    write(cache, blocks, len(token_ids), value)
    cache.publish(whole_input_hash(token_ids), len(token_ids), blocks)
    cache.release(blocks)


def find_input(cache: WholeInputCache, token_ids):
    return cache.find(whole_input_hash(token_ids), len(token_ids))


def test_an_input_is_found_again_with_its_rows_partial_block_included():
    cache = new_input_cache()
    assert find_input(cache, INPUT) is None
    encode(cache, INPUT, 1.0)
    blocks = find_input(cache, INPUT)
    assert blocks is not None and len(blocks) == 2
    check_pool_integrity(cache.pool, [blocks])
    ids = [block.block_id for block in blocks]
    assert torch.equal(cache.stage_outputs.gather(ids, 6)["h"], torch.ones(6, 2))
    cache.release(blocks)
    check_pool_integrity(cache.pool, [])


@pytest.mark.parametrize("other", [INPUT[:4], INPUT[:5], [*INPUT, 11], [*INPUT[:5], 0]])
def test_a_shared_prefix_is_no_hit(other):
    cache = new_input_cache()
    encode(cache, INPUT, 1.0)
    assert find_input(cache, other) is None


def test_an_input_with_an_evicted_block_is_not_found():
    cache = new_input_cache(num_blocks=4)
    encode(cache, INPUT, 1.0)
    encode(cache, [1] * 8, 2.0)  # takes one free block and one of the input's
    assert len(cache.pool.hash_tables[0]) == 3
    assert find_input(cache, INPUT) is None
    check_pool_integrity(cache.pool, [])
    encode(cache, INPUT, 3.0)
    assert find_input(cache, INPUT) is not None


def test_an_input_without_rows_of_a_wanted_tensor_is_not_found():
    cache = new_input_cache()
    encode(cache, INPUT, 1.0)
    other = cache.allocate(1)
    write(cache, other, 1, 1.0, name="k")
    assert find_input(cache, INPUT) is None
    check_pool_integrity(cache.pool, [other])


def test_an_input_without_its_last_row_is_not_found():
    cache = new_input_cache()
    blocks = cache.allocate(6)
    write(cache, blocks, 5, 1.0)
    cache.publish(whole_input_hash(INPUT), 6, blocks)
    cache.release(blocks)
    assert find_input(cache, INPUT) is None


def test_capacity_errors_state_needed_and_free_blocks():
    cache = new_input_cache(num_blocks=4)
    with pytest.raises(ValueError, match="length 13 needs 4 blocks of 4, 3 are free now"):
        cache.allocate(13)
    held = cache.allocate(5)
    with pytest.raises(ValueError, match="length 8 needs 2 blocks of 4, 1 are free now"):
        cache.allocate(8)
    with pytest.raises(ValueError, match="length of at least 1, got 0"):
        cache.allocate(0)
    with pytest.raises(ValueError, match="takes 3 blocks, got 2"):
        cache.publish(whole_input_hash(INPUT), 12, held)
    check_pool_integrity(cache.pool, [held])


NUM_BLOCKS, NUM_LAYERS, KV_HEADS, HEAD_DIM = 5, 3, 2, 6


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
    # The whole buffer is used: no gaps between pages.
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
    """Return the bytes of the buffer that a view covers, found by writing through it."""
    memory.buffer.zero_()
    *outer, inner = view.shape
    ones = torch.ones(*outer, inner * view.itemsize, dtype=torch.uint8)
    view.copy_(ones.view(view.dtype))
    return set(memory.buffer.nonzero().flatten().tolist())


def pages_of(memory: PagedMemory, group_id: int) -> list[set[int]]:
    """Return for each page of a group the bytes that its layers' views cover."""
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
        assert len(seen) == memory.nbytes, "the pages fill the buffer"


def padded_config() -> KVCacheConfig:
    """Odd state sizes next to attention, and attention pages padded by hand."""
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
    assert len(reached) == memory.nbytes // 2, "the padding belongs to no view"


def test_states_of_any_type_are_read_as_written():
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


def test_clearing_a_large_page_clears_the_pages_of_all_groups_in_it():
    memory = PagedMemory(mixed_config({"full": 2, "mamba": 3}, 3, 4))
    memory.buffer.fill_(1)
    memory.clear_null_page()
    for group_id, ratio in ((0, 3), (1, 2)):
        assert memory.config.pages_per_large_page(group_id) == ratio
    (states,) = memory.state(1, 0)
    assert not states[:2].any() and states[2:].all()
    memory.clear_page(1, 3)
    assert not states[3].any() and states[2].all() and states[4:].all()


def test_accessing_a_group_as_another_kind_is_an_error():
    memory = PagedMemory(mixed_config({"full": 1, "mamba": 1, "host": 1}, 3, 4))
    with pytest.raises(ValueError, match=r"group 0 \(FullAttentionSpec\) keeps no states"):
        memory.state(0, 0)
    with pytest.raises(ValueError, match=r"group 1 \(MambaSpec\) keeps no keys and values"):
        memory.layer(1, 0)
    with pytest.raises(ValueError, match=r"group 2 \(HostOnlySpec\) keeps no keys and values"):
        memory.row_mapping(2, torch.tensor([0]))
