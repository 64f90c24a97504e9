"""Promise 3: a row is this block's, or it is a miss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from prefix_cache import BlockPool, StageOutputCache

BLOCK_SIZE = 4


def new_cache(num_blocks: int = 6, names=None) -> tuple[BlockPool, StageOutputCache]:
    pool = BlockPool.uniform(num_blocks)
    return pool, StageOutputCache(num_blocks, BLOCK_SIZE, pool.generations(0), names)


def slots_of(block_ids: list[int], start: int, end: int) -> Tensor:
    """Slots of positions [start, end), computed one by one."""
    return torch.tensor(
        [block_ids[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, end)],
        dtype=torch.int64,
    )


def numbered(num_rows: int, width: int = 3, first: float = 1.0) -> Tensor:
    return torch.arange(num_rows * width, dtype=torch.float32).view(num_rows, width) + first


def test_rows_come_back_by_block_table_whatever_the_order_of_blocks():
    pool, cache = new_cache()
    ids = [block.block_id for block in pool.allocate({0: 3})[0]][::-1]
    rows = numbered(10)
    cache.write(slots_of(ids, 0, 10), {"h": rows})
    assert torch.equal(cache.gather(ids, 10)["h"], rows)
    assert torch.equal(cache.gather(ids, 9, start=3)["h"], rows[3:9])
    assert torch.equal(cache.gather(ids, 8, start=4)["h"], rows[4:8])
    assert cache.gather(ids, 5, start=5)["h"].shape == (0, 3)
    assert cache.num_valid_rows(ids) == 10 and cache.num_valid_blocks(ids) == 2


def test_stores_have_the_stated_shape_and_each_name_its_own_type():
    pool, cache = new_cache()
    ids = [block.block_id for block in pool.allocate({0: 1})[0]]
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
    pool, cache = new_cache()
    ids = [block.block_id for block in pool.allocate({0: 1})[0]]
    assert cache.gather([], 0) == {}
    cache.write(slots_of(ids, 0, 4), {"h": numbered(4), "nothing": torch.empty(4, 0)})
    gathered = cache.gather(ids, 3)
    assert (gathered["h"].shape, gathered["nothing"].shape) == ((3, 3), (3, 0))
    assert {name: rows.shape[0] for name, rows in cache.gather([], 0).items()} == {
        "h": 0,
        "nothing": 0,
    }


def test_gathered_rows_share_no_memory_with_the_store():
    pool, cache = new_cache()
    ids = [block.block_id for block in pool.allocate({0: 1})[0]]
    source = numbered(4)
    cache.write(slots_of(ids, 0, 4), {"h": source})
    source.zero_()
    first = cache.gather(ids, 4)["h"]
    first.zero_()
    assert torch.equal(cache.gather(ids, 4)["h"], numbered(4))


def test_blocks_that_were_never_handed_out_hold_no_rows():
    _, cache = new_cache()
    cache.write(torch.arange(4), {"h": numbered(4)})
    # Slots 0 to 3 are the null block: padding may be written there and is nobody's.
    assert cache.gather([0], 1) == {} and cache.num_valid_rows([0]) == 0
    # Block 3 was neither handed out nor written: both generations are 0, and it is no match.
    assert cache.gather([3], 1) == {}


def test_a_tensor_of_another_length_is_dropped_for_good():
    pool, cache = new_cache()
    ids = [block.block_id for block in pool.allocate({0: 2})[0]]
    # Two requests decode one token each: the pooled rows, one per request, look like tokens.
    decode = slots_of(ids, 0, 1), slots_of(ids, 4, 5)
    cache.write(torch.cat(decode), {"h": numbered(2), "pooled": numbered(2)})
    assert cache.gather(ids, 1).keys() == {"h", "pooled"}
    # A prefill step tells them apart.
    cache.write(slots_of(ids, 1, 4), {"h": numbered(3), "pooled": numbered(2)})
    assert cache.shapes.keys() == cache.wanted == {"h"}
    assert cache.mirrors("h") and cache.mirrors("new") and not cache.mirrors("pooled")
    cache.write(torch.cat(decode), {"h": numbered(2), "pooled": numbered(2)})
    assert cache.shapes.keys() == {"h"}
    assert cache.num_valid_blocks(ids[:1]) == 1, "a dropped name is not waited for"


def test_scalars_are_not_per_token():
    pool, cache = new_cache()
    pool.allocate({0: 1})
    cache.write(torch.tensor([4]), {"loss": torch.tensor(1.0), "h": numbered(1)})
    assert cache.shapes.keys() == {"h"}


def test_a_step_without_tokens_decides_nothing():
    pool, cache = new_cache()
    pool.allocate({0: 1})
    cache.write(torch.empty(0, dtype=torch.int64), {"h": numbered(3)})
    cache.write(torch.tensor([4]), {"h": numbered(1)})
    assert cache.shapes.keys() == {"h"}


def test_only_named_tensors_are_mirrored_and_all_of_them_are_wanted():
    pool, cache = new_cache(names=["h", "codes"])
    ids = [block.block_id for block in pool.allocate({0: 1})[0]]
    cache.write(slots_of(ids, 0, 4), {"h": numbered(4), "other": numbered(4)})
    assert cache.shapes.keys() == {"h"} and cache.wanted == {"h", "codes"}
    assert cache.mirrors("codes") and not cache.mirrors("other")
    assert cache.num_valid_blocks(ids) == 0, "codes were never seen"
    cache.write(slots_of(ids, 0, 4), {"codes": numbered(4)})
    assert cache.num_valid_blocks(ids) == 1
    assert cache.gather(ids, 4, names=["codes"]).keys() == {"codes"}


def test_a_wanted_name_that_turns_out_not_to_be_per_token_is_given_up():
    pool, cache = new_cache(names=["h", "pooled"])
    ids = [block.block_id for block in pool.allocate({0: 1})[0]]
    cache.write(slots_of(ids, 0, 4), {"h": numbered(4), "pooled": numbered(1)})
    assert cache.wanted == {"h"} and cache.num_valid_blocks(ids) == 1
    assert cache.num_valid_blocks(ids, names=["pooled"]) == 0


def test_a_cache_without_tensors_shortens_nothing():
    pool, cache = new_cache()
    ids = [block.block_id for block in pool.allocate({0: 2})[0]]
    assert cache.num_valid_blocks(ids) == 2 and cache.gather(ids, 8) == {}
    none_mirrored = StageOutputCache(6, BLOCK_SIZE, pool.generations(0), names=[])
    none_mirrored.write(slots_of(ids, 0, 8), {"h": numbered(8)})
    assert none_mirrored.shapes == {} and none_mirrored.num_valid_blocks(ids) == 2


@pytest.mark.parametrize("changed", [numbered(4, width=5), numbered(4).double()])
def test_a_changed_width_or_type_is_an_error_and_writes_nothing(changed):
    pool, cache = new_cache()
    ids = [block.block_id for block in pool.allocate({0: 1})[0]]
    tensors = {"a": numbered(4), "h": numbered(4)}
    cache.write(slots_of(ids, 0, 4), tensors)
    with pytest.raises(
        ValueError, match=r"'h' has rows of shape \(\d,\).*had shape \(3,\)"
    ) as error:
        cache.write(slots_of(ids, 0, 4), {"a": numbered(4, first=9.0), "h": changed})
    assert str(changed.dtype) in str(error.value)
    assert torch.equal(cache.gather(ids, 4)["a"], tensors["a"])
    # The error is not fatal for good.
    cache.write(slots_of(ids, 0, 4), {"h": numbered(4, first=7.0)})
    assert torch.equal(cache.gather(ids, 4)["h"], numbered(4, first=7.0))


def test_grad_and_inference_modes_of_the_model_do_not_matter():
    pool, cache = new_cache()
    ids = [block.block_id for block in pool.allocate({0: 1})[0]]
    with torch.inference_mode():
        cache.write(slots_of(ids, 0, 2), {"h": numbered(2)})
    cache.write(slots_of(ids, 2, 4), {"h": numbered(2).requires_grad_()})
    gathered = cache.gather(ids, 4)["h"]
    assert not gathered.requires_grad and not gathered.is_inference()
    assert torch.equal(gathered, torch.cat([numbered(2), numbered(2)]))


def test_mistakes_are_named():
    pool, cache = new_cache()
    with pytest.raises(ValueError, match=r"rows \[0, 9\) are not within 2 blocks of 4"):
        cache.gather([1, 2], 9)
    with pytest.raises(ValueError, match=r"rows \[3, 2\)"):
        cache.gather([1, 2], 2, start=3)
    with pytest.raises(ValueError, match=r"int64 of shape \(7,\), got torch.int64 of shape \(6,\)"):
        StageOutputCache(7, BLOCK_SIZE, pool.generations(0))
    with pytest.raises(ValueError, match=r"got torch.int32"):
        StageOutputCache(6, BLOCK_SIZE, pool.generations(0).int())
